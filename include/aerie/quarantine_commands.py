"""``./aerie quarantine``: what did not come out well, what it looks like, and having it generated again."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aerie.errors import BadInput, Retryable

if TYPE_CHECKING:
    from aerie.quarantine import Selection
    from aerie.store.queries.ledger import LedgerRow

app = typer.Typer(no_args_is_help=True, help="Samples that did not come out well.")

Edition = Annotated[str, typer.Option(help="Edition to look at.")]
Dataset = Annotated[str | None, typer.Option(help="Only this data set.")]
Reason = Annotated[str | None, typer.Option(help="Only samples with this reason, or (kept ones too) with this flag.")]
SampleIds = Annotated[list[str] | None, typer.Argument(help="Only these samples, whatever their state.")]


def _selection(edition: str, dataset: str | None, reason: str | None, sample_ids: Sequence[str] | None) -> "Selection":
    from aerie.boundary.rules import POLICY_PREFIX, RULES
    from aerie.quarantine import Selection

    known = (*RULES, *(f"{POLICY_PREFIX}{name}" for name in RULES))
    if reason is not None and reason not in known and not reason.startswith("request_"):
        raise BadInput(f"--reason {reason}: expected a failed request's (request_...) or one of {', '.join(RULES)}")
    return Selection(edition, dataset, reason, tuple(sample_ids or ()))


@app.command("list")
def list_samples(
    sample_ids: SampleIds = None,
    edition: Edition = "main",
    dataset: Dataset = None,
    reason: Reason = None,
    rows: Annotated[bool, typer.Option("--rows", help="One line a sample instead of counts.")] = False,
) -> None:
    """Count quarantined samples by data set and reason; from the store, else from what validate left on disk."""
    from aerie.settings.machine import data_root

    selection = _selection(edition, dataset, reason, sample_ids)
    try:
        found = _find(selection)
    except (BadInput, Retryable) as error:
        typer.echo(f"aerie: {error}; from the verdicts of validate on disk instead:", err=True)
        found = selection.find_in_verdicts(data_root())
    _print(found, rows=rows or bool(sample_ids))


def _find(selection: "Selection") -> "dict[str, list[LedgerRow]]":
    from aerie.local.configuration import store_url
    from aerie.store.connection import connected

    with connected(store_url(), application="aerie quarantine") as connection:
        return selection.find(connection)


def _print(found: "Mapping[str, Sequence[LedgerRow]]", *, rows: bool) -> None:
    from rich.console import Console

    from aerie.quarantine import counts_table, rows_table

    # A pipe is no terminal of 80 columns: nothing is folded there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if not found:
        typer.echo("no such samples")
        return
    console.print(rows_table(found) if rows else counts_table(found))


@app.command()
def show(
    sample_id: Annotated[str, typer.Argument(help="Sample to show.")],
    edition: Edition = "main",
    dataset: Annotated[str | None, typer.Option(help="Its data set; by default looked up in the store.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Cut neither text nor ids.")] = False,
    config: Annotated[Path | None, typer.Option(help="Configuration of the edition (AERIE_CONFIG).")] = None,
) -> None:
    """Show every version of a sample: verdict, positions, ids, and text with the boundary marked."""
    from aerie.quarantine import show as lines_of
    from aerie.settings.machine import data_root, server_folder, settings_path
    from aerie.settings.pipeline import load_settings
    from aerie.stages import StageRequest

    key = dataset or _dataset_of(edition, sample_id)
    request = StageRequest(
        settings=load_settings(config or settings_path()), data_root=data_root(), server_folder=server_folder(),
        edition=edition, dataset=key, run_id="quarantine show",
    )  # fmt: skip
    for line in lines_of(request, sample_id, whole=whole):
        typer.echo(line)


def _dataset_of(edition: str, sample_id: str) -> str:
    found = _find(_selection(edition, None, None, [sample_id]))
    if len(found) != 1:
        what = f"in {', '.join(found)}" if found else "not among those that came out"
        raise BadInput(f"sample {sample_id} of edition {edition} is {what}: name its data set with --dataset")
    return next(iter(found))


@app.command()
def regenerate(
    sample_ids: SampleIds = None,
    edition: Edition = "main",
    dataset: Dataset = None,
    reason: Reason = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
) -> None:
    """Have samples generated again by the next generate; what they had before stays in the response log."""
    from aerie.local.configuration import store_url
    from aerie.quarantine import regenerate as ask_again
    from aerie.settings.machine import data_root

    if not (sample_ids or dataset or reason):
        raise BadInput("regenerate: say which samples, by --dataset, --reason or their ids")
    selection = _selection(edition, dataset, reason, sample_ids)
    found = {key: rows for key, rows in _find(selection).items() if _is_generated(edition, key)}
    _print(found, rows=bool(sample_ids))
    if not found:
        return
    if not yes and not (sys.stdin.isatty() and typer.confirm("Have these generated again?")):
        typer.echo("nothing was changed; --yes does it")
        return
    for key in found:
        done = ask_again(store_url(), data_root(), selection, key)
        typer.echo(
            f"{edition}/{key}: pending again: {len(done):,}. Generate the data set again (a run of this edition), and "
            "they are sent anew"
        )


def _is_generated(edition: str, dataset: str) -> bool:
    from aerie.artefacts.layout import EditionFiles
    from aerie.settings.machine import data_root

    files = EditionFiles(data_root(), edition).dataset(dataset)
    if files.imported.exists():
        typer.echo(f"aerie: {dataset} came already tokenised: there is nothing to generate; left out", err=True)
    return not files.imported.exists()
