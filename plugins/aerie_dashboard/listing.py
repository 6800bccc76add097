"""Runs and editions as lines of a table, from rows of the store."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from aerie.settings.pipeline import keys_in_order
from aerie.store.queries.ledger import LedgerCounts
from aerie.store.queries.rows import Row
from aerie_dashboard.documents import Stored, Unreadable, read_document

Counts = Mapping[tuple[str, str], LedgerCounts]


class RunConfig(Stored):
    """What a run was asked for."""

    datasets: tuple[str, ...]
    budget_tokens: int | None
    configuration: str
    pilot: bool | None = None
    """None for runs of before there were pilots."""


class DatasetSummary(Stored):
    """What a run says of one data set at its end."""

    response_tokens: int
    budget: int | None
    stopped_by: str | None
    reasoning_share: float | None


class BenchmarkSummary(Stored):
    """What a run says of its drafter at its end."""

    acceptance_length: float


class Summary(Stored):
    """What a run says of itself at its end."""

    datasets: Mapping[str, DatasetSummary]
    benchmark: BenchmarkSummary | None


@dataclass(frozen=True)
class RunLine:
    """One run in a table. ``tokens`` are kept response tokens: of its summary, or of its edition where it has none."""

    run_id: str
    edition: str
    state: str
    started_at: datetime
    finished_at: datetime | None
    config: RunConfig | Unreadable
    summary: Summary | Unreadable | None
    tokens: int | None

    @property
    def seconds(self) -> float:
        """How long it took, or has taken."""
        return ((self.finished_at or datetime.now(UTC)) - self.started_at).total_seconds()

    @property
    def acceptance_length(self) -> float | None:
        """Acceptance length of its drafter, None where it has none or its summary cannot be read."""
        benchmark = self.summary.benchmark if isinstance(self.summary, Summary) else None
        return benchmark.acceptance_length if benchmark else None

    def budget_of(self, key: str) -> int | None:
        """Budget of one of its data sets, None as long as it has no summary that says so."""
        summary = self.summary.datasets.get(key) if isinstance(self.summary, Summary) else None
        return summary.budget if summary else None

    @property
    def problems(self) -> tuple[Unreadable, ...]:
        """Stored documents of it that cannot be read."""
        return tuple(one for one in (self.config, self.summary) if isinstance(one, Unreadable))


def run_line(row: Row, counts: Counts) -> RunLine:
    """A run, from its row and the ledger's counts."""
    place = f"runs, run_id {row['run_id']}"
    config = read_document(RunConfig, row["config"], place=f"{place}, config")
    # A run that its closing task did not get to ended without a summary.
    summarised = row["finished_at"] is not None and row["summary"]
    summary = read_document(Summary, row["summary"], place=f"{place}, summary") if summarised else None
    return RunLine(
        run_id=row["run_id"],
        edition=row["edition"],
        state=row["state"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        config=config,
        summary=summary,
        tokens=_tokens(row["edition"], config, summary, counts),
    )


def _tokens(
    edition: str, config: RunConfig | Unreadable, summary: Summary | Unreadable | None, counts: Counts
) -> int | None:
    if isinstance(summary, Summary):
        return sum(one.response_tokens for one in summary.datasets.values())
    if summary is not None or isinstance(config, Unreadable):
        return None
    found = (counts.get((edition, key)) for key in config.datasets)
    return sum(one.kept_response_tokens for one in found if one)


@dataclass(frozen=True)
class DatasetLine:
    """One data set of an edition."""

    key: str
    counts: LedgerCounts
    stopped_by: str | None


@dataclass(frozen=True)
class EditionLine:
    """One edition: its data sets, and the last run on it."""

    name: str
    datasets: tuple[DatasetLine, ...]
    last_run: RunLine | None

    @property
    def tokens(self) -> int:
        """Kept response tokens of all data sets."""
        return sum(one.counts.kept_response_tokens for one in self.datasets)

    @property
    def kept(self) -> int:
        """Kept samples of all data sets."""
        return sum(one.counts.kept for one in self.datasets)

    @property
    def quarantined(self) -> int:
        """Quarantined samples of all data sets."""
        return sum(one.counts.quarantined for one in self.datasets)


def editions_of(rows: Iterable[Row], counts: Counts, runs: Sequence[RunLine]) -> list[EditionLine]:
    """Editions, those with the latest run first; the data sets of each in the pipeline's order."""
    stops = {(row["edition"], row["dataset"]): row["stopped_by"] for row in rows}
    latest = {run.edition: run for run in reversed(runs)}
    names = dict.fromkeys([*(run.edition for run in runs), *(edition for edition, _ in counts)])
    return [
        EditionLine(
            name,
            tuple(
                DatasetLine(key, counts[name, key], stops.get((name, key)))
                for key in keys_in_order(key for edition, key in counts if edition == name)
            ),
            latest.get(name),
        )
        for name in names
    ]
