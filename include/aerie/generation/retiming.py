"""The run's timeline again, from what a data set's canary has measured."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aerie.serving.timeline import Measured, Timeline, finished_in, only, plan_timeline
from aerie.stages import StageRequest


def retime(request: StageRequest, figures: Mapping[str, Any]) -> Timeline:
    """The timeline of the run's data sets from now on; ``figures`` are those of this data set's reporter.

    A canary keeps few requests in flight, so its speed is taken only where the configuration expects none; what it
    tells of the length of responses is always believed. Data sets whose generation has a manifest are finished.
    """
    settings, dataset = only(request.settings, request.selected), str(request.dataset)
    expected = settings.expected_rates.tokens_per_second_low is not None
    measured = finished_in(request.files, settings)
    measured[dataset] = Measured(
        mean_response_tokens=figures["mean_completion_tokens"],
        tokens_per_second=None if expected else figures["tokens_per_second"] or None,
        kept_tokens=figures["response_tokens"],
        prompts=figures["prompts"],
    )
    return plan_timeline(settings, starts=datetime.now(UTC).astimezone(), measured=measured)


def timeline_line(timeline: Timeline, dataset: str) -> str:
    """The timeline in one line: this data set, all generation, and its end."""
    row = next(row for row in timeline.datasets if row.dataset == dataset)
    hours = "hours not known" if row.capped is None else f"{row.capped} h ({row.capped_sum})"
    whole = "not known yet" if timeline.capped is None else f"{timeline.capped} h"
    ends = ""
    if timeline.generation_ends is not None:
        first, last = (f"{moment:%Y-%m-%d %H:%M}" for moment in timeline.generation_ends)
        ends = f", until {first}" if first == last else f", until {first} to {last}"
    return f"Timeline after the canary: {dataset} {hours}; generation of all data sets {whole}{ends}"


def timeline_figures(timeline: Timeline, dataset: str) -> dict[str, float | None]:
    """The same for the time series, in hours; None is not known."""
    row = next(row for row in timeline.datasets if row.dataset == dataset)
    return {
        "timeline_dataset_hours_low": row.capped.low if row.capped else None,
        "timeline_dataset_hours_high": row.capped.high if row.capped else None,
        "timeline_generation_hours_low": timeline.capped.low if timeline.capped else None,
        "timeline_generation_hours_high": timeline.capped.high if timeline.capped else None,
    }
