"""What Airflow loads of Aerie."""

from airflow.plugins_manager import AirflowPlugin


class AeriePlugin(AirflowPlugin):
    """Aerie's entry in Airflow's list of plugins."""

    name = "aerie"
