"""What a run came to, as data and as tables. Every figure is the store's or a manifest's."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from aerie.artefacts.manifest import Manifest
from aerie.settings.pipeline import DatasetSettings, keys_in_order
from aerie.stages import StageRequest
from aerie.store.connection import Connection
from aerie.store.queries.decisions import list_decisions
from aerie.store.queries.ledger import LedgerCounts, count_editions
from aerie.store.queries.manifests import latest_manifests
from aerie.store.queries.rows import Row
from aerie.store.queries.runs import read_edition

Manifests = Mapping[tuple[str, str | None], Manifest]


def read_manifests(connection: Connection, *, edition: str) -> Manifests:
    """The newest manifest of each stage and data set of an edition."""
    return {
        (row["stage"], row["dataset"]): Manifest.model_validate(row["document"])
        for row in latest_manifests(connection, edition=edition)
    }


def build_summary(connection: Connection, request: StageRequest) -> dict[str, Any]:
    """Summary of the run's edition and data sets; a part that the edition does not have yet is None."""
    manifests = read_manifests(connection, edition=request.edition)
    ledger = count_editions(connection, edition=request.edition)
    datasets = {}
    for key in request.selected:
        counts = ledger.get((request.edition, key))
        validated = manifests.get(("validate", key))
        if counts is not None:
            stopped_by = _stopped_by(connection, request, key)
            datasets[key] = _dataset(request.settings.dataset(key), counts, validated, stopped_by)
    return {
        "datasets": datasets,
        "corpus": _corpus(manifests),
        "hidden_states": _counts(manifests, "capture", "files", "bytes"),
        "training": _counts(manifests, "train", "steps", "first_loss", "last_loss"),
        "benchmark": _benchmark(manifests),
        "decisions": [_decision(row) for row in list_decisions(connection, run_id=request.run_id)],
    }


def _decision(row: Row) -> dict[str, Any]:
    return {
        "task_id": row["task_id"],
        "subject": row["subject"],
        "approved": row["approved"],
        "by": row["decided_by"],
        "at": row["decided_at"].isoformat(timespec="seconds"),
    }


def rejections(summary: Mapping[str, Any]) -> list[str]:
    """What people rejected in a run, a line each: who, what and when."""
    return [
        f"{one['by']} rejected {one['subject']!r} at {one['at']}" for one in summary["decisions"] if not one["approved"]
    ]


def _stopped_by(connection: Connection, request: StageRequest, key: str) -> str | None:
    if request.settings.dataset(key).kind == "tokenised":
        return "imported"
    edition = read_edition(connection, edition=request.edition, dataset=key)
    return edition["stopped_by"] if edition else None


def _dataset(
    settings: DatasetSettings, counts: LedgerCounts, validated: Manifest | None, stopped_by: str | None
) -> dict[str, Any]:
    return {
        "prompts": counts.prompts,
        "generated": counts.kept + counts.quarantined if settings.kind == "generated" else 0,
        "kept": counts.kept,
        "quarantined": counts.quarantined,
        "flagged": counts.flagged,
        "response_tokens": counts.kept_response_tokens,
        "budget": settings.budget_tokens if settings.kind == "generated" else None,
        "stopped_by": stopped_by,
        "reasoning_share": validated.counts["reasoning_share"] if validated else None,
    }


def _counts(manifests: Manifests, stage: str, *names: str) -> dict[str, Any] | None:
    manifest = manifests.get((stage, None))
    return {name: manifest.counts[name] for name in names} if manifest else None


def _corpus(manifests: Manifests) -> dict[str, Any] | None:
    corpus = _counts(manifests, "merge", "rows", "tokens", "distinct_tokens")
    vocabulary = _counts(manifests, "vocabulary", "coverage")
    return {**corpus, "coverage": vocabulary["coverage"] if vocabulary else None} if corpus else None


def _benchmark(manifests: Manifests) -> dict[str, Any] | None:
    return _counts(
        manifests, "benchmark", "acceptance_length", "acceptance_length_untrained", "lossless", "per_dataset",
        "tokens_per_second", "tokens_per_second_without",
    )  # fmt: skip


def in_order(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with its data sets in the pipeline's order, which the store's ``jsonb`` does not keep."""
    ordered = {**summary, "datasets": _by_key(summary["datasets"])}
    if benchmark := summary["benchmark"]:
        ordered["benchmark"] = {**benchmark, "per_dataset": _by_key(benchmark["per_dataset"])}
    return ordered


def _by_key(datasets: Mapping[str, Any]) -> dict[str, Any]:
    return {key: datasets[key] for key in keys_in_order(datasets)}


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def dataset_table(datasets: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table of data sets."""
    table = Table(title="Data sets", title_justify="left")
    table.add_column("data set")
    for column in ("prompts", "generated", "kept", "quarantined", "flagged", "response tokens", "budget"):
        table.add_column(column, justify="right")
    table.add_column("stopped by")
    table.add_column("with reasoning", justify="right")
    for key, row in datasets.items():
        names = ("prompts", "generated", "kept", "quarantined", "flagged", "response_tokens", "budget")
        share = row["reasoning_share"]
        table.add_row(
            key,
            *(_number(row[name]) for name in names),
            row["stopped_by"] or "-",
            "-" if share is None else f"{share:.1%}",
        )
    return table


def tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The summary for a person at a terminal."""
    yield dataset_table(summary["datasets"])
    if corpus := summary["corpus"]:
        coverage = "-" if corpus["coverage"] is None else f"{corpus['coverage']:.2%}"
        yield (
            f"Corpus: {corpus['rows']:,} rows, {corpus['tokens']:,} tokens, {corpus['distinct_tokens']:,} distinct; "
            f"the draft vocabulary covers {coverage} of response tokens"
        )
    if states := summary["hidden_states"]:
        yield f"Hidden states: {states['files']:,} files, {states['bytes'] / 1e6:,.1f} MB"
    if training := summary["training"]:
        yield f"Training: {training['steps']:,} steps, loss {training['first_loss']:.3f} -> {training['last_loss']:.3f}"
    if benchmark := summary["benchmark"]:
        yield (
            f"Benchmark: acceptance length {benchmark['acceptance_length']:.2f} "
            f"(untrained drafter {_number(benchmark['acceptance_length_untrained'])}); "
            f"lossless: {'yes' if benchmark['lossless'] else 'NO'}; "
            f"{_number(benchmark['tokens_per_second'])} tokens/s with the drafter, "
            f"{_number(benchmark['tokens_per_second_without'])} without"
        )
    for rejection in rejections(summary):
        yield f"Ended by a decision: {rejection}"
