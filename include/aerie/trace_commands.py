"""``./aerie trace``: the way of one sample through an edition."""

from typing import Annotated

import typer


def trace(
    sample_id: Annotated[str, typer.Argument(help="Sample to follow.")],
    edition: Annotated[str, typer.Option(help="Edition of the sample.")] = "main",
    dataset: Annotated[str | None, typer.Option(help="Its data set (default: look in all).")] = None,
    source_row: Annotated[
        bool, typer.Option("--source-row", help="Also read the source until the sample's row is found.")
    ] = False,
) -> None:
    """Follow a sample: source, prompt, response, verdict, corpus row, hidden states; where it ends, why."""
    from aerie.artefacts.layout import EditionFiles
    from aerie.settings.machine import data_root
    from aerie.tracing import trace as follow

    if source_row:
        from aerie.judging_commands import move_to_model_environment

        move_to_model_environment()
    key, steps = follow(EditionFiles(data_root(), edition), sample_id, dataset)
    typer.echo(f"sample {sample_id}: {edition}/{key}")
    for step in steps:
        typer.echo(f"  {step.name:<13} {'' if step.found else 'ends here: '}{step.text}")
        if step.name == "source" and source_row:
            typer.echo(f"  {'':<13} {_source_row(key, sample_id)}")


def _source_row(dataset: str, sample_id: str) -> str:
    from aerie.prompts.source_row import find_source_row
    from aerie.settings.machine import settings_path
    from aerie.settings.pipeline import load_settings

    where = find_source_row(load_settings(settings_path()), dataset, sample_id)
    return where or "no row of the configured source makes this sample now: it, or its settings, have changed"
