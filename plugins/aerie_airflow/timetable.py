"""A schedule that never starts a run by itself, for backfills: Airflow refuses those of a DAG without a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.timetables.trigger import CronTriggerTimetable

if TYPE_CHECKING:
    from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction


class OnDemandTimetable(CronTriggerTimetable):
    """Runs are triggered by hand, or by a backfill: one for each day of its dates, at 00:00 UTC."""

    def __init__(self) -> None:
        super().__init__("0 0 * * *", timezone="UTC")
        self.description = "Runs are triggered by hand or by a backfill, never by the clock"

    @property
    def summary(self) -> str:
        """What Airflow's list of DAGs shows as the schedule."""
        return "On demand"

    @classmethod
    def deserialize(cls, _data: dict[str, Any]) -> OnDemandTimetable:
        """The timetable again, from what ``serialize`` gave: it has nothing to choose."""
        return cls()

    def serialize(self) -> dict[str, Any]:
        """Nothing: every instance is the same."""
        return {}

    def next_dagrun_info(
        self, *, last_automated_data_interval: DataInterval | None, restriction: TimeRestriction
    ) -> DagRunInfo | None:
        """The next day of a backfill; None for the scheduler, which asks without an end."""
        if restriction.latest is None:
            return None
        return super().next_dagrun_info(
            last_automated_data_interval=last_automated_data_interval, restriction=restriction
        )
