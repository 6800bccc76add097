"""One data set of an edition: its figures, its samples, and one sample as text."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar, get_args

from fastapi import APIRouter, HTTPException, Query, Request, Response, status
from fastapi.responses import HTMLResponse
from pydantic import NonNegativeInt

from aerie.artefacts.response_log import find_row
from aerie.errors import AerieError
from aerie.store.connection import Connection
from aerie.store.queries.ledger import State, count_ledger, count_reasons
from aerie.store.queries.manifests import latest_manifests
from aerie.store.queries.metrics import sample_metrics
from aerie.store.queries.rows import Row
from aerie.store.queries.runs import read_edition
from aerie.store.queries.samples import (
    Length,
    LengthFigures,
    SampleFilter,
    count_lengths,
    measure_lengths,
    page_of_samples,
    read_sample,
)
from aerie_dashboard.charts import Chart, Series
from aerie_dashboard.corpus_report import corpus_report_of
from aerie_dashboard.decoded import PreviewDocument, sections_of
from aerie_dashboard.documents import Stored, Unreadable, read_document
from aerie_dashboard.lengths import BARS, length_chart, width_of_bars
from aerie_dashboard.opened_store import Store
from aerie_dashboard.rendering import render
from aerie_dashboard.response_files import response_log_of

router = APIRouter()

Model = TypeVar("Model", bound=Stored)

STATES: tuple[State, ...] = get_args(State)
SAMPLES_A_PAGE = 50
LENGTHS: Mapping[Length, str] = {"reasoning": "Reasoning", "answer": "Answer, and all else besides reasoning"}


class SourceCounts(Stored):
    """What ``prepare`` or ``import`` counted of its source."""

    rows: NonNegativeInt
    skipped: Mapping[str, NonNegativeInt]
    set_aside: Mapping[str, NonNegativeInt]
    skipped_examples: Mapping[str, tuple[str, ...]]


class ValidateCounts(Stored):
    """What ``validate`` counted of kept rows."""

    reasoning_share: float
    reasoning_rows: NonNegativeInt
    tool_call_rows: NonNegativeInt


class GenerateCounts(Stored):
    """What ``generate`` counted at its end."""

    budget: NonNegativeInt
    seconds: float


class IntervalFigures(Stored):
    """What ``generate`` reports while it runs."""

    tokens_per_second: float | None
    budget_tokens: NonNegativeInt | None
    """None is everything that there is."""


class ManifestCounts(Stored):
    """The counts of a manifest, of whatever stage."""

    counts: Mapping[str, object]


@dataclass(frozen=True)
class Histogram:
    """How long one part of the responses is."""

    title: str
    figures: LengthFigures
    chart: Chart | None


@router.get("/editions/{edition}/datasets/{dataset}")
def show_dataset(request: Request, store: Store, edition: str, dataset: str) -> HTMLResponse:
    """Figures of one data set."""
    counts = count_ledger(store, edition=edition, dataset=dataset)
    manifests = {row["stage"]: row for row in latest_manifests(store, edition=edition) if row["dataset"] == dataset}
    settings = read_edition(store, edition=edition, dataset=dataset)
    if not counts.prompts and not manifests and settings is None:
        raise _no_dataset(edition, dataset)
    metrics = sample_metrics(store, edition=edition, stage="generate", dataset=dataset)
    rates, problem = _rates(metrics, edition=edition, dataset=dataset)
    source = _counts(manifests, ("prepare", "import"), SourceCounts)
    generated = _counts(manifests, ("generate",), GenerateCounts)
    validated = _counts(manifests, ("validate",), ValidateCounts)
    found = count_reasons(store, edition=edition, dataset=dataset)
    return render(
        request,
        "dataset.html",
        edition=edition,
        dataset=dataset,
        corpus_report=corpus_report_of(edition) is not None,
        counts=counts,
        settings=settings,
        manifests=manifests,
        source=source,
        validated=validated,
        budget=_budget(metrics, generated),
        imported="import" in manifests,
        histograms=[_histogram(store, edition, dataset, length) for length in LENGTHS],
        quarantine=found.get("quarantined", {}),
        skips=found.get("skipped", {}),
        failures=found.get("failed", {}),
        flags=found.get("flags", {}),
        rates=rates,
        problems=[one for one in (source, generated, validated, problem) if isinstance(one, Unreadable)],
    )


def _no_dataset(edition: str, dataset: str) -> HTTPException:
    return HTTPException(
        status.HTTP_404_NOT_FOUND,
        f"edition {edition} has no data set {dataset}: nothing of it was prepared or imported",
    )


def _counts(manifests: Mapping[str, Row], stages: Iterable[str], model: type[Model]) -> Model | Unreadable | None:
    """The counts of the manifest of the first of ``stages`` that there is; None where there is none."""
    row = next((manifests[stage] for stage in stages if stage in manifests), None)
    if row is None:
        return None
    place = f"manifests, id {row['id']} ({row['stage']})"
    document = read_document(ManifestCounts, row["document"], place=place)
    if isinstance(document, Unreadable):
        return document
    return read_document(model, document.counts, place=f"{place}, counts")


def _budget(metrics: list[Row], generated: GenerateCounts | Unreadable | None) -> int | None:
    """Tokens asked for, as last said by ``generate``; 0 is everything, None is not known."""
    latest = read_document(IntervalFigures, metrics[-1]["figures"], place="") if metrics else None
    if isinstance(latest, IntervalFigures):
        return latest.budget_tokens or 0
    return generated.budget if isinstance(generated, GenerateCounts) else None


def _rates(metrics: list[Row], *, edition: str, dataset: str) -> tuple[Chart | None, Unreadable | None]:
    """Tokens per second over time, with a gap between runs."""
    labels: list[str] = []
    values: list[float | None] = []
    run_id = None
    for row in metrics:
        place = f"interval_metrics, {edition}/{dataset}, at {row['at'].isoformat()}"
        figures = read_document(IntervalFigures, row["figures"], place=place)
        if isinstance(figures, Unreadable):
            return None, figures
        if run_id not in (None, row["run_id"]):
            labels.append("")
            values.append(None)
        run_id = row["run_id"]
        labels.append(f"{row['at']:%m-%d %H:%M:%S}")
        values.append(figures.tokens_per_second)
    if not labels:
        return None, None
    series = Series(name="tokens/s", values=tuple(values), colour="blue")
    chart = Chart(
        kind="line", title="Generated tokens per second", labels=tuple(labels), series=(series,), x_title="time (UTC)",
        y_title="tokens/s",
    )  # fmt: skip
    return chart, None


def _histogram(store: Connection, edition: str, dataset: str, length: Length) -> Histogram:
    figures = measure_lengths(store, edition=edition, dataset=dataset, length=length)
    if figures.longest is None:
        return Histogram(LENGTHS[length], figures, None)
    width = width_of_bars(figures)
    counts = count_lengths(store, edition=edition, dataset=dataset, length=length, width=width, bars=BARS)
    title = "Responses by tokens"
    return Histogram(LENGTHS[length], figures, length_chart(title, counts, width=width, longest=figures.longest))


@router.get("/editions/{edition}/datasets/{dataset}/samples")
def list_samples(
    request: Request,
    store: Store,
    edition: str,
    dataset: str,
    state: str = "",
    finding: str = "",
    prefix: Annotated[str, Query(max_length=200)] = "",
    decoded: bool = False,
    after: str | None = None,
    before: str | None = None,
) -> HTMLResponse:
    """A page of samples, narrowed by state, by reason or flag, by how the id begins."""
    if state and state not in STATES:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"no state {state}: expected one of {', '.join(STATES)}")
    counts = count_ledger(store, edition=edition, dataset=dataset)
    if not counts.prompts and read_edition(store, edition=edition, dataset=dataset) is None:
        raise _no_dataset(edition, dataset)
    chosen: State | None = next((one for one in STATES if one == state), None)
    wanted = SampleFilter(state=chosen, finding=finding or None, prefix=prefix.strip() or None, decoded=decoded)
    found = page_of_samples(
        store, edition=edition, dataset=dataset, wanted=wanted, after=after, before=before, rows=SAMPLES_A_PAGE
    )
    findings = count_reasons(store, edition=edition, dataset=dataset)
    return render(
        request,
        "samples.html",
        edition=edition,
        dataset=dataset,
        counts=counts,
        states=[(one, getattr(counts, one)) for one in STATES],
        findings=sorted({name for names in findings.values() for name in names} | ({finding} if finding else set())),
        wanted=wanted,
        # What the links to other pages carry along.
        carried={
            name: value
            for name, value in (
                ("state", state), ("finding", finding), ("prefix", prefix.strip()),
                ("decoded", "true" if decoded else ""),
            )
            if value
        },
        page=found,
    )  # fmt: skip


@router.get("/editions/{edition}/datasets/{dataset}/samples/{sample_id:path}")
def show_sample(request: Request, store: Store, edition: str, dataset: str, sample_id: str) -> HTMLResponse:
    """One sample: what the ledger has of it, and its text where it was decoded."""
    row = _sample(store, edition, dataset, sample_id)
    place = f"previews, {edition}/{dataset}/{sample_id}"
    preview = None if row["preview"] is None else read_document(PreviewDocument, row["preview"], place=place)
    shown = preview if isinstance(preview, PreviewDocument) else None
    return render(
        request,
        "sample.html",
        edition=edition,
        dataset=dataset,
        sample=row,
        preview=preview,
        sections=sections_of(shown) if shown else [],
        positions=_positions(shown) if shown else [],
        outdated=shown is not None and _outdated(row, shown),
        show_command=shlex.join(["./aerie", "quarantine", "show", sample_id, "--edition", edition]),
        again_command=shlex.join(["./aerie", "quarantine", "regenerate", sample_id, "--edition", edition]),
    )


def _sample(store: Connection, edition: str, dataset: str, sample_id: str) -> Row:
    row = read_sample(store, edition=edition, dataset=dataset, sample_id=sample_id)
    if row is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"{edition}/{dataset} has no sample {sample_id}")
    return row


def _positions(preview: PreviewDocument) -> list[tuple[str, tuple[int, ...]]]:
    """Reasons and flags with the tokens at which they were found, counted from the first of the prompt."""
    return [(name, preview.positions.get(name, ())) for name in (*preview.reasons, *preview.flags)]


def _outdated(row: Row, preview: PreviewDocument) -> bool:
    """Whether the ledger has another verdict than the text was decoded with: the sample was judged or asked anew."""
    decoded = (preview.verdict, set(preview.reasons), set(preview.flags), preview.reasoning_tokens)
    return decoded != (row["state"], set(row["reasons"]), set(row["flags"]), row["reasoning_tokens"])


@router.get("/editions/{edition}/datasets/{dataset}/responses/{sample_id:path}")
def read_response(store: Store, edition: str, dataset: str, sample_id: str) -> Response:
    """The row of the response log, as the server answered it."""
    _sample(store, edition, dataset, sample_id)
    log = response_log_of(edition, dataset)
    try:
        line = find_row(log, sample_id)
    except AerieError as error:
        raise HTTPException(status.HTTP_409_CONFLICT, str(error)) from error
    if line is None:
        raise HTTPException(
            status.HTTP_404_NOT_FOUND,
            f"the response log of {edition}/{dataset} has no row of sample {sample_id}: it was not generated, it was "
            "imported, it was asked for again, or the log is on another host",
        )
    return Response(line, media_type="application/json")
