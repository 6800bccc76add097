"""How long a run takes: each data set with and without its budget, then every later phase, and a date.

Rates are given or measured. What is not known is said, and never guessed: a phase without a rate has no hours, and
then the whole has no end.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from aerie.artefacts.layout import EditionFiles
from aerie.settings.pipeline import ExpectedRates, PipelineSettings

SECONDS_PER_HOUR = 3600
MINUTES_PER_HOUR = 60


@dataclass(frozen=True)
class Range:
    """An amount that lies between two bounds."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)

    def __str__(self) -> str:
        low, high = f"{self.low:,.1f}", f"{self.high:,.1f}"
        return low if low == high else f"{low}-{high}"


@dataclass(frozen=True)
class Measured:
    """What a data set's responses so far say of the rest; ``finished`` ones take no more time."""

    mean_response_tokens: float | None = None
    completions_per_minute: float | None = None
    tokens_per_second: float | None = None
    kept_tokens: int = 0
    prompts: int | None = None
    finished: bool = False


@dataclass(frozen=True)
class DatasetHours:
    """One data set. ``uncapped`` is all prompts at so many completions a minute, ``capped`` the budget's tokens."""

    dataset: str
    imported: bool
    prompts: int | None
    completions_per_minute: float | None
    tokens: float | None
    corpus_tokens: float | None
    uncapped: float | None
    capped: Range | None
    uncapped_sum: str
    capped_sum: str


@dataclass(frozen=True)
class PhaseHours:
    """One phase after generation; ``hours`` is None where its rate or its tokens are not known."""

    phase: str
    hours: Range | None
    sum: str


@dataclass(frozen=True)
class Timeline:
    """The whole run. ``unknown`` names what is missing for an end; ``ends`` lies between two dates."""

    starts: datetime
    datasets: tuple[DatasetHours, ...]
    uncapped: float | None
    capped: Range | None
    capped_sum: str
    phases: tuple[PhaseHours, ...]
    generation_ends: tuple[datetime, datetime] | None
    ends: tuple[datetime, datetime] | None
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


def only(settings: PipelineSettings, keys: Iterable[str]) -> PipelineSettings:
    """The same configuration with only these data sets; with all where none is named."""
    chosen = {key: settings.datasets[key] for key in keys}
    return settings.model_copy(update={"datasets": chosen}) if chosen else settings


def finished_in(files: EditionFiles, settings: PipelineSettings) -> dict[str, Measured]:
    """What an edition shows: a data set whose generation has a manifest is finished."""
    return {
        key: Measured(finished=True)
        for key, dataset in settings.datasets.items()
        if dataset.kind == "generated" and files.dataset(key).manifest("generate").exists()
    }


def plan_timeline(
    settings: PipelineSettings,
    *,
    starts: datetime,
    rate: Range | None = None,
    measured: Mapping[str, Measured] | None = None,
) -> Timeline:
    """The timeline of a configuration.

    Args:
        settings: its data sets, their budgets and what is expected of them.
        starts: when generation begins.
        rate: response tokens a second over all requests; None takes the configuration's.
        measured: what data sets have shown so far, which is believed before what was expected.
    """
    rates = settings.expected_rates
    if rate is None and rates.tokens_per_second_low is not None and rates.tokens_per_second_high is not None:
        rate = Range(rates.tokens_per_second_low, rates.tokens_per_second_high)
    seen = measured or {}
    rows = tuple(_dataset(settings, key, rate, seen.get(key, Measured())) for key in settings.datasets)
    generated = [row for row in rows if not row.imported]
    uncapped = _total(row.uncapped for row in generated)
    capped = _total_range(row.capped for row in generated)
    tokens = _total(row.corpus_tokens for row in rows if not row.imported or row.corpus_tokens is not None)
    phases = tuple(later_phases(rates, tokens, epochs=settings.training.epochs))
    hours = [capped, *(phase.hours for phase in phases)]
    unknown = tuple(_unknown(generated, rate, phases))
    return Timeline(
        starts=starts,
        datasets=rows,
        uncapped=uncapped,
        capped=capped,
        capped_sum=_capped_sum(generated, rate, capped),
        phases=phases,
        generation_ends=_dates(starts, capped),
        ends=_dates(starts, _total_range(hours)),
        unknown=unknown,
        notes=tuple(_notes(rows)),
    )


def _dataset(settings: PipelineSettings, key: str, rate: Range | None, seen: Measured) -> DatasetHours:
    dataset = settings.datasets[key]
    expected = dataset.expected
    prompts = seen.prompts or (expected.prompts if expected else None)
    per_minute = (
        seen.completions_per_minute
        or (expected.completions_per_minute if expected else None)
        or settings.expected_rates.completions_per_minute
    )
    response = seen.mean_response_tokens or (expected.mean_response_tokens if expected else None)
    prompt = expected.mean_prompt_tokens if expected else None
    if dataset.kind == "tokenised":
        whole = prompts * (prompt + response) if prompts and prompt and response else None
        return DatasetHours(key, True, prompts, None, None, whole, 0.0, Range(0, 0), "", "arrives tokenised")
    tokens, tokens_sum = _tokens(dataset.budget_tokens, prompts, response)
    rest = None if tokens is None else max(0.0, tokens - seen.kept_tokens)
    if seen.finished:
        rest, tokens_sum = 0.0, "finished"
    row = DatasetHours(
        dataset=key,
        imported=False,
        prompts=prompts,
        completions_per_minute=per_minute,
        tokens=rest,
        corpus_tokens=None if tokens is None else tokens * (1 + prompt / response if prompt and response else 1),
        uncapped=prompts / per_minute / MINUTES_PER_HOUR if prompts and per_minute else None,
        capped=None,
        uncapped_sum=f"{prompts:,} prompts / {per_minute:g} a minute" if prompts and per_minute else "",
        capped_sum="",
    )
    if seen.kept_tokens and rest is not None:
        tokens_sum += f" - {seen.kept_tokens:,} there"
    return _with_capped(
        row, tokens_sum, Range(*(seen.tokens_per_second,) * 2) if seen.tokens_per_second else rate, response
    )


def _tokens(budget: int, prompts: int | None, response: float | None) -> tuple[float | None, str]:
    """Response tokens that a data set will have: its budget, or what all its prompts give where that is less."""
    everything = prompts * response if prompts and response else None
    if everything is not None and (not budget or everything < budget):
        return everything, f"{prompts:,} prompts x {response:,.0f} tokens"
    return (float(budget), f"{budget:,} tokens") if budget else (None, "")


def _with_capped(row: DatasetHours, tokens_sum: str, rate: Range | None, response: float | None) -> DatasetHours:
    if row.tokens is None:
        return row
    if not row.tokens:
        return replace(row, capped=Range(0, 0), capped_sum=tokens_sum)
    if rate is not None:
        hours = Range(row.tokens / rate.high / SECONDS_PER_HOUR, row.tokens / rate.low / SECONDS_PER_HOUR)
        return replace(row, capped=hours, capped_sum=f"{tokens_sum} / {_rate(rate)} tokens/s")
    if row.completions_per_minute and response:
        whole = row.tokens / response / row.completions_per_minute / MINUTES_PER_HOUR
        how = f"{tokens_sum} / {response:,.0f} a response / {row.completions_per_minute:g} a minute"
        return replace(row, capped=Range(whole, whole), capped_sum=how)
    return row


def later_phases(rates: ExpectedRates, tokens: float | None, *, epochs: int) -> Iterator[PhaseHours]:
    """The phases after generation of a corpus of so many tokens, prompts included."""
    for phase, rate, times in (
        ("merge", rates.merge_tokens_per_second, 1),
        ("capture", rates.capture_tokens_per_second, 1),
        ("training", rates.training_tokens_per_second, epochs),
    ):
        if rate is None or tokens is None:
            missing = "its rate" if rate is None else "the tokens of every data set"
            yield PhaseHours(phase, None, f"{missing} is not known")
            continue
        hours = tokens * times / rate / SECONDS_PER_HOUR
        passes = f" x {times} epochs" if phase == "training" else ""
        yield PhaseHours(phase, Range(hours, hours), f"{tokens:,.0f} tokens{passes} / {rate:,.0f} tokens/s")
    if rates.benchmark_hours is None:
        yield PhaseHours("benchmark", None, "its hours are not known")
    else:
        yield PhaseHours("benchmark", Range(rates.benchmark_hours, rates.benchmark_hours), "given")


def _unknown(generated: list[DatasetHours], rate: Range | None, phases: Iterable[PhaseHours]) -> Iterator[str]:
    if missing := [row.dataset for row in generated if row.capped is None]:
        what = "the rate (--rate, or expected_rates of the configuration)" if rate is None else "prompts and lengths"
        yield f"{what} of {', '.join(missing)}"
    if missing := [row.dataset for row in generated if row.uncapped is None]:
        yield f"uncapped: prompts or completions a minute of {', '.join(missing)}"
    if missing := [phase.phase for phase in phases if phase.hours is None]:
        yield f"the rates of {', '.join(missing)} (expected_rates of the configuration)"


def _notes(rows: tuple[DatasetHours, ...]) -> Iterator[str]:
    without = [row.dataset for row in rows if row.imported and row.corpus_tokens is None]
    if without:
        yield f"later phases are without {', '.join(without)}, whose tokens are not known"
    if bare := [
        row.dataset for row in rows if not row.imported and row.corpus_tokens and row.corpus_tokens == row.tokens
    ]:
        yield f"later phases are without the prompts of {', '.join(bare)}, whose lengths are not known"
    yield "server starts between the phases are not counted"


def _capped_sum(generated: list[DatasetHours], rate: Range | None, capped: Range | None) -> str:
    tokens = _total(row.tokens for row in generated)
    if rate is None or tokens is None or capped is None:
        return ""
    return f"{tokens:,.0f} tokens / {_rate(rate)} tokens/s = {capped} h"


def _rate(rate: Range) -> str:
    return f"{rate.low:,.0f}-{rate.high:,.0f}" if rate.low != rate.high else f"{rate.low:,.0f}"


def _total(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None)


def _total_range(values: Iterable[Range | None]) -> Range | None:
    total = Range(0, 0)
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _dates(starts: datetime, hours: Range | None) -> tuple[datetime, datetime] | None:
    if hours is None:
        return None
    try:
        return starts + timedelta(hours=hours.low), starts + timedelta(hours=hours.high)
    except OverflowError:  # later than the calendar goes
        return None


def as_document(timeline: Timeline) -> dict[str, Any]:
    """The timeline as JSON data; hours that are not known are null."""
    return {
        "starts": timeline.starts.isoformat(timespec="seconds"),
        "datasets": [
            {
                "dataset": row.dataset,
                "imported": row.imported,
                "prompts": row.prompts,
                "completions_per_minute": row.completions_per_minute,
                "uncapped_hours": _round(row.uncapped),
                "tokens": row.tokens,
                "capped_hours": _bounds(row.capped),
                "uncapped_sum": row.uncapped_sum,
                "capped_sum": row.capped_sum,
            }
            for row in timeline.datasets
        ],
        "uncapped_hours": _round(timeline.uncapped),
        "capped_hours": _bounds(timeline.capped),
        "capped_sum": timeline.capped_sum,
        "phases": [
            {"phase": phase.phase, "hours": _bounds(phase.hours), "sum": phase.sum} for phase in timeline.phases
        ],
        "generation_ends": _moments(timeline.generation_ends),
        "ends": _moments(timeline.ends),
        "unknown": list(timeline.unknown),
        "notes": list(timeline.notes),
    }


def _round(hours: float | None) -> float | None:
    return None if hours is None else round(hours, 3)


def _bounds(hours: Range | None) -> list[float] | None:
    return None if hours is None else [round(hours.low, 3), round(hours.high, 3)]


def _moments(dates: tuple[datetime, datetime] | None) -> list[str] | None:
    return None if dates is None else [moment.isoformat(timespec="minutes") for moment in dates]
