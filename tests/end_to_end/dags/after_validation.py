"""A DAG as a user writes it, on one of the pipeline's assets."""

from airflow.sdk import Asset, dag, task

VALIDATED = Asset("aerie_validated_B3_magicoder", uri="aerie://validated/B3_magicoder")


@dag(schedule=[VALIDATED])
def after_validation():
    @task
    def look(triggering_asset_events=None):
        return [event.extra for events in triggering_asset_events.values() for event in events]

    look()


after_validation()
