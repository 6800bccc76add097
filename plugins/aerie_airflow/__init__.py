"""Aerie under Airflow: operators and notifications. ``aerie_plugin.py`` is the one file that Airflow loads itself."""
