"""The dashboard: pages inside Airflow's UI, from the store. ``aerie_plugin.py`` mounts its app."""

PREFIX = "/aerie"
"""Where Airflow's API server has the app."""
