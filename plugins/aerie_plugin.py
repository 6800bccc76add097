"""What Airflow loads of Aerie."""

from airflow.plugins_manager import AirflowPlugin

from aerie_airflow.timetable import OnDemandTimetable


class AeriePlugin(AirflowPlugin):
    """Aerie's entry in Airflow's list of plugins."""

    name = "aerie"
    timetables = [OnDemandTimetable]
