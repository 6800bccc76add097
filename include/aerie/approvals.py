"""What a person is asked before a run goes on, as Markdown. Every figure is a manifest's or the configuration's."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aerie.artefacts.drafter_record import drafter_id_of
from aerie.artefacts.manifest import Manifest
from aerie.errors import BadInput
from aerie.pipeline import STEPS, RunParameters
from aerie.serving.timeline import PhaseHours, Range, later_phases
from aerie.settings.pipeline import PipelineSettings, keys_in_order

Manifests = Mapping[tuple[str, str | None], Manifest]
Gate = Literal["capture", "publish"]
"""The step that waits for an approval."""

STEP_OF_PHASE = {"capture": "capture", "training": "train", "benchmark": "benchmark"}
NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Question:
    """What is asked, and what it is decided by."""

    subject: str
    body: str


def question(gate: Gate, settings: PipelineSettings, parameters: RunParameters, manifests: Manifests) -> Question:
    """The question before a step.

    Raises:
        BadInput: the edition lacks what the question is about.
    """
    return _QUESTIONS[gate](settings, parameters, manifests)


def _before_capture(settings: PipelineSettings, parameters: RunParameters, manifests: Manifests) -> Question:
    edition = parameters.edition
    counts = _counts(manifests, "forecast", edition)
    corpus = _counts(manifests, "merge", edition)
    streamed = counts.get("window_bytes")  # forecasts of before know neither streaming nor hours
    wanted = counts["bytes"] if streamed is None else streamed
    missing = max(0, wanted - counts["present_bytes"])
    discarded = counts.get("discarded_bytes", 0)  # of before: none was told of
    forced = [("Discarded first", f"{_size(discarded)} of states that are there: the run is forced")]
    phases = [
        _as_forecast(phase, counts)
        for phase in later_phases(settings.expected_rates, counts["tokens"], epochs=settings.training.epochs)
        if phase.phase in STEP_OF_PHASE and STEPS.index(STEP_OF_PHASE[phase.phase]) <= STEPS.index(parameters.last_step)
    ]
    rows = [
        ("Corpus", f"{corpus['rows']:,} rows, {counts['tokens']:,} tokens, {len(corpus['datasets'])} data sets"),
        (
            "Hidden states",
            f"{_size(counts['bytes'])} ({counts['tokens']:,} tokens x {counts['bytes_per_token']:,} bytes)",
        ),
        ("Still to be written", _size(missing) + ("" if streamed is None else ", at once: streamed while training")),
        *(forced if discarded else ()),
        ("Disk", f"{_size(counts['free_bytes'])} free, {_size(counts['spared_bytes'])} of them stay free"),
        *((f"Hours of {phase.phase}", _hours(phase)) for phase in phases),
        ("Hours in all", _total(phases)),
        ("Cost", _cost(settings, phases)),
        ("Latest benchmark of the edition", _earlier_benchmark(manifests)),
    ]
    first = phases[0].phase if phases else "capture"
    last = phases[-1].phase if phases else "capture"
    through = first if first == last else f"{first} to {last}"
    return Question(
        subject=f"Go on with {through} of edition {edition}?",
        body=f"{_table(('', ''), rows)}\n\nHidden states are written to `{counts['folder']}`.",
    )


def _as_forecast(phase: PhaseHours, counts: Mapping[str, Any]) -> PhaseHours:
    """The capture as its forecast has it: what is there already takes no time, and what was measured is believed."""
    if phase.phase != "capture" or counts.get("hours") is None:
        return phase
    told = f"{counts['missing_tokens']:,} tokens / {counts['tokens_per_second']:,.0f} tokens/s, {counts['rate_source']}"
    return PhaseHours("capture", Range(counts["hours"], counts["hours"]), told)


def _before_publishing(settings: PipelineSettings, parameters: RunParameters, manifests: Manifests) -> Question:
    counts = _counts(manifests, "benchmark", parameters.edition)
    drafter = drafter_id_of(parameters.edition, counts["drafter_fingerprint"])
    header = (
        "Data set", "Prompts", "Acceptance length", "Untrained", "Accepted drafts", "Tokens/s", "Without", "Speed-up",
        "Lossless",
    )  # fmt: skip
    rows = [(key, *_acceptance(counts["per_dataset"][key])) for key in keys_in_order(counts["per_dataset"])]
    rows.append(("**All**", *_acceptance(counts)))
    asked = counts["settings"]
    return Question(
        subject=f"Publish drafter {drafter}?",
        body="\n\n".join(
            [
                "\n".join(f"- {gate['gate']}: **{gate['verdict']}**: {gate['said']}" for gate in counts["gates"]),
                _promise(counts["estimate"]),
                _table(header, rows),
                f"Measured at concurrency {asked['concurrency']}, {_setting(asked)}. {counts['definition']}.",
                _table(("At once", "Tokens/s", "Without", "Speed-up"), map(_speed, counts["by_concurrency"])),
                f"Recommended to serve with: {_recommended(counts)} ({counts['recommendation']['rule']}).",
                f"It is copied to `{settings.publish.folder / drafter}`.",
            ]
        ),
    )


_QUESTIONS: Mapping[Gate, Callable[[PipelineSettings, RunParameters, Manifests], Question]] = {
    "capture": _before_capture,
    "publish": _before_publishing,
}


def _counts(manifests: Manifests, stage: str, edition: str) -> Mapping[str, Any]:
    manifest = manifests.get((stage, None))
    if manifest is None:
        raise BadInput(f"edition {edition}: the store has no manifest of {stage}, which the approval is about; run it")
    return manifest.counts


def _hours(phase: PhaseHours) -> str:
    return f"{NOT_KNOWN}: {phase.sum}" if phase.hours is None else f"{phase.hours} h ({phase.sum})"


def _known(phases: Iterable[PhaseHours]) -> Range:
    return sum((phase.hours for phase in phases if phase.hours is not None), Range(0, 0))


def _total(phases: list[PhaseHours]) -> str:
    """Hours of all phases; where one is not known, what the others take at least."""
    missing = [phase.phase for phase in phases if phase.hours is None]
    if len(missing) == len(phases):
        return NOT_KNOWN
    return f"{_known(phases)} h" if not missing else f"at least {_known(phases)} h; {', '.join(missing)} {NOT_KNOWN}"


def _cost(settings: PipelineSettings, phases: list[PhaseHours]) -> str:
    per_hour, currency = settings.approvals.cost_per_hour, settings.approvals.currency
    missing = [phase.phase for phase in phases if phase.hours is None]
    if per_hour is None:
        return f"{NOT_KNOWN}: approvals.cost_per_hour is not set"
    if len(missing) == len(phases):
        return f"{NOT_KNOWN}: no hours are known, at {per_hour:,.2f} {currency} an hour"
    hours = _known(phases)
    cost = Range(hours.low * per_hour, hours.high * per_hour)
    least = f"at least {cost} {currency}" if missing else f"{cost} {currency}"
    return f"{least} ({hours} h x {per_hour:,.2f} {currency})"


def _earlier_benchmark(manifests: Manifests) -> str:
    manifest = manifests.get(("benchmark", None))
    if manifest is None:
        return "none: no pilot, and no earlier run, was measured"
    return f"acceptance length {manifest.counts['acceptance_length']:.2f}, {manifest.finished_at:%Y-%m-%d %H:%M} UTC"


def _length(acceptance_length: float | None) -> str:
    """None where nothing was verified, because every answer was one token long."""
    return "-" if acceptance_length is None else f"{acceptance_length:.2f}"


def _acceptance(row: Mapping[str, Any]) -> tuple[str, ...]:
    rate = row["acceptance_rate"]
    return (
        f"{row['prompts']:,}",
        _length(row["acceptance_length"]),
        _length(row["acceptance_length_untrained"]),
        "-" if rate is None else f"{rate:.0%}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_second_without']:,.0f}",
        f"{row['speed_up']:.2f}x",
        "yes" if row["lossless"] else "**NO**",
    )


def _setting(drafted: Mapping[str, Any]) -> str:
    return (
        f"{drafted['num_steps']} draft steps, top-k {drafted['eagle_topk']}, {drafted['num_draft_tokens']} draft tokens"
    )


def _recommended(counts: Mapping[str, Any]) -> str:
    return "**no draft setting**" if counts["recommended"] is None else _setting(counts["recommended"])


def _promise(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "There were no validation rows to promise an acceptance length."
    return (
        f"Validation promised {estimate['acceptance_length']:.2f}: what is served is "
        f"{estimate['relative_distance']:+.1%} from it."
    )


def _speed(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['concurrency']:,}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_second_without']:,.0f}",
        f"{row['speed_up']:.2f}x",
    )


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table, the first column to the left and numbers to the right."""
    lines = [header, ("---", *("---:" for _ in header[1:])), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
