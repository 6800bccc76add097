"""Drafters: how they were trained, how well they draft, what they were made from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query, Request, status
from fastapi.responses import HTMLResponse
from pydantic import NonNegativeInt, PositiveInt

from aerie.artefacts.manifest import Manifest
from aerie.benchmark.advice import FOR_CAUSES, FOR_GATES
from aerie.errors import BadInput
from aerie.lineage import Lineage, trace_drafter
from aerie.settings.pipeline import keys_in_order
from aerie.store.connection import Connection
from aerie.store.queries.benchmarks import list_benchmarks
from aerie.store.queries.drafters import page_of_drafters, read_drafter
from aerie.store.queries.manifests import list_manifests
from aerie.store.queries.metrics import sample_metrics
from aerie.store.queries.rows import Row
from aerie_dashboard.charts import Chart, Series
from aerie_dashboard.corpus_report import corpus_report_of
from aerie_dashboard.documents import Stored, Unreadable, read_document
from aerie_dashboard.opened_store import Store
from aerie_dashboard.rendering import render

router = APIRouter()

POINTS = 400
LAST_PAGE = 10_000
"""A number beyond PostgreSQL's integers would be an error of the server's."""
SHARE = "share of tokens"
AROUND_TRAINING = timedelta(minutes=2)
"""A stage's first and last figures come a little before and after what its manifest counts."""


class Training(Stored):
    """What ``export`` records of a training."""

    steps: NonNegativeInt
    epochs: NonNegativeInt
    seconds: float
    first_loss: float
    last_loss: float
    drafter_parameters: NonNegativeInt
    draft_vocabulary_size: NonNegativeInt
    layers: tuple[int, ...]
    dtype: str
    resumed_from_step: NonNegativeInt


class DatasetBenchmark(Stored):
    """How well a drafter drafts one data set; None is what was not measured."""

    prompts: NonNegativeInt
    lossless: bool
    acceptance_length: float | None
    acceptance_length_untrained: float | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    tokens_per_second: float
    tokens_per_second_without: float
    speed_up: float


class DraftSetting(Stored):
    """How deep and how wide a server drafts."""

    num_steps: PositiveInt
    eagle_topk: PositiveInt
    num_draft_tokens: PositiveInt

    @property
    def words(self) -> str:
        """In words."""
        return f"{self.num_steps} steps, top-k {self.eagle_topk}, {self.num_draft_tokens} draft tokens"


class Tried(DraftSetting):
    """A draft setting as it was measured."""

    acceptance_length: float | None
    tokens_per_second: float
    different_outputs: NonNegativeInt


class Recommendation(Stored):
    """What a draft setting was recommended by."""

    rule: str
    concurrency: PositiveInt
    tried: tuple[Tried, ...]


class Estimate(Stored):
    """What validation promised, and how far the served acceptance length is from it."""

    acceptance_length: float
    relative_distance: float
    coverage: float


class Temperature(Stored):
    """The sampling that acceptance was measured at beside greedy decoding, as far as it is shown."""

    temperature: float


class Sampled(Stored):
    """Acceptance at the sampling of generation."""

    sampling: Temperature
    acceptance_length: float | None
    tokens_per_second: float


class NotMeasured(Stored):
    """Why something was not measured; None where it was, or nobody said."""

    sampled: str | None = None


class Losslessness(Stored):
    """Whether the drafter changes what the verifier says."""

    verdict: Literal["identical", "ties", "changed"]
    said: str


class Gate(Stored):
    """One condition of the benchmark, and how it went."""

    gate: str
    verdict: Literal["passed", "failed", "not judged"]
    said: str

    @property
    def advice(self) -> str | None:
        """What to do, of one that failed; None where nobody wrote it, or there is nothing to do."""
        return FOR_GATES.get(self.gate) if self.verdict == "failed" else None

    @property
    def cells(self) -> tuple[str, str, str, None]:
        """Name, verdict and why, as a row of the table; what to do stands at the top of the page."""
        return self.gate, self.verdict, self.said, None


class Cause(Stored):
    """A usual cause of a poor drafter, and whether it has it."""

    cause: str
    verdict: Literal["ok", "suspect", "not known"]
    evidence: str

    @property
    def advice(self) -> str | None:
        """What to do, of one that is suspect; None where nobody wrote it, or there is nothing to do."""
        return FOR_CAUSES.get(self.cause) if self.verdict == "suspect" else None

    @property
    def cells(self) -> tuple[str, str, str, str | None]:
        """Name, verdict, evidence and what to do, as a row of the table."""
        return self.cause, self.verdict, self.evidence, self.advice


class Benchmark(DatasetBenchmark):
    """How well a drafter drafts, over all data sets and of each.

    The rest is of the pipeline's own benchmark alone, which judges; one of before it did has none of it either.
    """

    definition: str
    per_dataset: Mapping[str, DatasetBenchmark]
    recommended: DraftSetting | None = None
    recommendation: Recommendation | None = None
    estimate: Estimate | None = None
    losslessness: Losslessness | None = None
    sampled: Sampled | None = None
    not_measured: NotMeasured = NotMeasured()
    gates: tuple[Gate, ...] = ()
    checklist: tuple[Cause, ...] = ()

    @property
    def failed(self) -> Sequence[Gate]:
        """The gates that it failed."""
        return [one for one in self.gates if one.verdict == "failed"]

    @property
    def suspects(self) -> Sequence[Cause]:
        """The usual causes that it may have."""
        return [one for one in self.checklist if one.verdict == "suspect"]

    @property
    def suspects_first(self) -> Sequence[Cause]:
        """The usual causes, those that it may have before those that it has not."""
        return sorted(self.checklist, key=lambda one: ("suspect", "not known", "ok").index(one.verdict))


@dataclass(frozen=True)
class DrafterLine:
    """One drafter in the list."""

    row: Row
    training: Training | Unreadable | None
    benchmark: Benchmark | Unreadable | None

    @property
    def problems(self) -> tuple[Unreadable, ...]:
        """Stored documents of it that cannot be read."""
        return tuple(one for one in (self.training, self.benchmark) if isinstance(one, Unreadable))


@dataclass(frozen=True)
class Measurement:
    """One benchmark of a drafter at one concurrency."""

    row: Row
    benchmark: Benchmark | Unreadable


@router.get("/drafters")
def show_drafters(request: Request, store: Store, page: Annotated[int, Query(ge=1, le=LAST_PAGE)] = 1) -> HTMLResponse:
    """A page of the drafters, newest first."""
    rows, more = page_of_drafters(store, number=page)
    return render(request, "drafters.html", drafters=[_line(row) for row in rows], page=page, more=more)


@router.get("/drafters/{drafter_id}")
def show_drafter(request: Request, store: Store, drafter_id: str) -> HTMLResponse:
    """One drafter."""
    row = read_drafter(store, drafter_id=drafter_id)
    if row is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"there is no drafter {drafter_id}")
    line = _line(row)
    measurements = [_measurement(found) for found in list_benchmarks(store, drafter_id=drafter_id)]
    lineage = _lineage(store, row)
    charts = _training_charts(_training_metrics(store, row, line.training, lineage))
    benchmark = line.benchmark if isinstance(line.benchmark, Benchmark) else None
    return render(
        request,
        "drafter.html",
        drafter=row,
        corpus_report=corpus_report_of(row["edition"]) is not None,
        training=line.training,
        benchmark=line.benchmark,
        charts=charts,
        acceptance=_acceptance_chart(benchmark) if benchmark else None,
        datasets=_in_order(benchmark) if benchmark else [],
        measurements=measurements,
        by_concurrency=_concurrency_chart(measurements),
        lineage=lineage,
        history=_history(lineage) if isinstance(lineage, Lineage) else [],
    )


def _line(row: Row) -> DrafterLine:
    place = f"drafters, drafter_id {row['drafter_id']}"
    return DrafterLine(
        row,
        read_document(Training, row["training"], place=f"{place}, training") if row["training"] else None,
        read_document(Benchmark, row["benchmark"], place=f"{place}, benchmark") if row["benchmark"] else None,
    )


def _measurement(row: Row) -> Measurement:
    return Measurement(row, read_document(Benchmark, row["document"], place=f"benchmarks, id {row['id']}"))


def _in_order(benchmark: Benchmark) -> list[tuple[str, DatasetBenchmark]]:
    return [(key, benchmark.per_dataset[key]) for key in keys_in_order(benchmark.per_dataset)]


# Training


def _training_metrics(
    store: Connection, row: Row, training: Training | Unreadable | None, lineage: Lineage | Unreadable
) -> list[Row]:
    """The series of the training that made this drafter, which an edition may have several of.

    There is none where its lineage does not tell which. One that was resumed has figures from before its manifest's
    seconds: everything up to its end is taken.
    """
    trained = lineage.of_stage("train") if isinstance(lineage, Lineage) else []
    if not trained:
        return []
    until = trained[0].manifest.finished_at
    since = None
    if isinstance(training, Training) and not training.resumed_from_step:
        since = until - timedelta(seconds=training.seconds) - AROUND_TRAINING
    return sample_metrics(
        store, edition=row["edition"], stage="train", since=since, until=until + AROUND_TRAINING, points=POINTS
    )


def _training_charts(rows: Sequence[Row]) -> list[Chart]:
    """Loss, accuracy and learning rate over steps; figures of validation stand at the step that they follow."""
    step: float = 0
    steps: list[float] = []
    figures: list[Mapping[str, object]] = []
    for row in rows:
        found = row["figures"]
        if isinstance(found.get("step"), int | float):
            step = found["step"]
        steps.append(step)
        figures.append(found)
    names = sorted({name for one in figures for name in one})
    accuracies = [name for name in names if name.startswith("accuracy_")]
    validations = [name for name in names if name.startswith("validation_cond_acc_")]
    wanted: list[tuple[str, str, list[tuple[str, str]], bool]] = [
        ("Loss", "loss", [("loss", "training"), ("validation_loss", "validation")], False),
        ("Accuracy in training, by draft position", SHARE, [(one, _position(one)) for one in accuracies], True),
        ("Accuracy in validation, by draft position", SHARE, [(one, _position(one)) for one in validations], True),
        ("Learning rate", "", [("learning_rate", "learning rate")], False),
    ]  # fmt: skip
    charts = [
        _step_chart(title, y_title, series, steps, figures, percent=percent)
        for title, y_title, series, percent in wanted
    ]
    return [chart for chart in charts if not chart.is_empty]


def _position(name: str) -> str:
    """``accuracy_0`` is of the first draft token."""
    return f"position {int(name.rpartition('_')[2]) + 1}"


def _step_chart(
    title: str, y_title: str, names: Sequence[tuple[str, str]], steps: Sequence[float],
    figures: Sequence[Mapping[str, object]], *, percent: bool,
) -> Chart:  # fmt: skip
    rows = [index for index, one in enumerate(figures) if any(name in one for name, _ in names)]
    return Chart(
        kind="line",
        title=title,
        labels=tuple(steps[index] for index in rows),
        series=tuple(
            Series(name=label, values=tuple(_figure(figures[index], name) for index in rows), joined=True)
            for name, label in names
            if any(name in one for one in figures)
        ),
        x_title="step",
        y_title=y_title,
        percent=percent,
    )


def _figure(figures: Mapping[str, object], name: str) -> float | None:
    value = figures.get(name)
    return value if isinstance(value, int | float) else None


# Benchmark


def _acceptance_chart(benchmark: Benchmark) -> Chart:
    rows = _in_order(benchmark)
    untrained = tuple(row.acceptance_length_untrained for _, row in rows)
    return Chart(
        kind="bar",
        title="Acceptance length by data set",
        labels=tuple(key for key, _ in rows),
        series=(
            Series(name="trained", values=tuple(row.acceptance_length for _, row in rows), colour="blue"),
            Series(name="before training", values=untrained, colour="grey"),
        ),
        y_title="tokens per verify step",
    )  # fmt: skip


def _concurrency_chart(measurements: Iterable[Measurement]) -> Chart | None:
    """Speed by concurrency, of the latest measurement at each; None where only one was measured."""
    latest: dict[int, Benchmark] = {}
    for one in measurements:
        if isinstance(one.benchmark, Benchmark):
            latest.setdefault(one.row["concurrency"], one.benchmark)
    if len(latest) < 2:
        return None
    rows = sorted(latest.items())
    return Chart(
        kind="bar",
        title="Tokens per second by concurrency",
        labels=tuple(f"{concurrency:,}" for concurrency, _ in rows),
        series=(
            Series(name="with the drafter", values=tuple(row.tokens_per_second for _, row in rows), colour="blue"),
            Series(name="without", values=tuple(row.tokens_per_second_without for _, row in rows), colour="grey"),
        ),
        x_title="requests at once",
        y_title="tokens/s",
    )


# Lineage


@dataclass(frozen=True)
class Step:
    """One step of a drafter's history, latest first, with what is told of each of its manifests."""

    title: str
    nodes: Sequence["Told"]


@dataclass(frozen=True)
class Told:
    """A manifest of a lineage: its figures as (name, value), and what it read."""

    manifest: Manifest
    facts: Sequence[tuple[str, object]]
    links: Sequence[object]


_STEPS: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    ("Drafter", ("export",), ("drafter_parameters", "dtype")),
    ("Training", ("train",), ("steps", "epochs", "first_loss", "last_loss")),
    ("Hidden states", ("capture",), ("files", "tokens", "bytes")),
    ("Draft vocabulary", ("vocabulary",), ("size", "coverage")),
    ("Corpus", ("merge",), ("rows", "tokens", "response_tokens")),
)
_DATASET_STEPS: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    ("Validated", ("validate",), ("kept", "quarantined", "response_tokens")),
    ("Responses", ("generate",), ("generated", "generated_tokens")),
    ("Prompts", ("prepare", "import"), ("prompts", "imported", "rows")),
)


def _lineage(store: Connection, row: Row) -> Lineage | Unreadable:
    place = f"manifests of edition {row['edition']}"
    manifests: list[Manifest] = []
    for found in list_manifests(store, edition=row["edition"]):
        manifest = read_document(Manifest, found["document"], place=f"manifests, id {found['id']}")
        if isinstance(manifest, Unreadable):
            return manifest
        manifests.append(manifest)
    fingerprint = row["drafter_id"].rpartition("-")[2]
    try:
        return trace_drafter(manifests, drafter_fingerprint=fingerprint)
    except BadInput as error:
        return Unreadable(place, str(error))


def _history(lineage: Lineage) -> list[tuple[str, list[Step]]]:
    """The drafter's own steps under an empty key, then those of each data set."""
    told = [("", [_step(lineage, *step, dataset=None) for step in _STEPS])]
    for key in keys_in_order(lineage.datasets):
        told.append((key, [_step(lineage, *step, dataset=key) for step in _DATASET_STEPS]))
    return told


def _step(
    lineage: Lineage, title: str, stages: tuple[str, ...], names: tuple[str, ...], *, dataset: str | None
) -> Step:
    return Step(
        title,
        [
            Told(
                node.manifest,
                [(name, node.manifest.counts[name]) for name in names if name in node.manifest.counts],
                node.links,
            )
            for node in lineage.of_stage(*stages, dataset=dataset)
        ],
    )
