"""Assets of the pipeline, for the schedules of other DAGs; their events say which edition, and where it lies.

An event means that the asset has an answer: its task did its work, or found that it was done. A task that was skipped,
that failed, or that lies before the run's first step tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset

if TYPE_CHECKING:
    from airflow.sdk import Context

GROUP = "aerie"
CORPUS = Asset(name="aerie_corpus", uri="aerie://corpus", group=GROUP)
DRAFTER = Asset(name="aerie_drafter", uri="aerie://drafter", group=GROUP)


def validated(dataset: str) -> Asset:
    """The validated edition of one data set."""
    return Asset(name=f"aerie_validated_{dataset}", uri=f"aerie://validated/{dataset}", group=GROUP)


def announce(context: Context, outlets: Iterable[Asset], facts: Mapping[str, Any]) -> None:
    """Put ``facts`` on the events that Airflow sends for a task's outlets when it succeeds."""
    for asset in outlets:
        context["outlet_events"][asset].extra = dict(facts)
