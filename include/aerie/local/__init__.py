"""The stack on one machine: environments, PostgreSQL, Airflow's processes."""
