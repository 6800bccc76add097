"""A run's deadline, and whether what is under way will end before it."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any


def past_deadline(figures: Mapping[str, Any], *, now: datetime, deadline: datetime) -> str | None:
    """One line on a data set whose end is expected after the deadline; None where it may still end before it.

    ``figures`` are those of a progress line. Its range must lie past the deadline as a whole: a first estimate is wide,
    and an alarm that comes to nothing teaches people to ignore the next. Where no rate is known, nothing is expected.
    """
    earliest, latest = figures.get("eta_low_seconds"), figures.get("eta_high_seconds")
    if earliest is None or now + timedelta(seconds=earliest) <= deadline:
        return None
    ends = f"{moment(now + timedelta(seconds=earliest))} or later"
    if latest is not None:
        ends = f"between {moment(now + timedelta(seconds=earliest))} and {moment(now + timedelta(seconds=latest))}"
    return (
        f"{figures['dataset']} is expected to end {ends}, past the run's deadline at {moment(deadline)} "
        "(alerts.deadline_hours)"
    )


def moment(at: datetime) -> str:
    """A time for people, to the minute."""
    return f"{at:%Y-%m-%d %H:%M} {at.tzname()}"
