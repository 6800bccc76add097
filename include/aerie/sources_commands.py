"""``./aerie sources``: the data sets' sources, looked at before anything is made of them."""

from typing import Annotated

import typer

from aerie.judging_commands import move_to_model_environment

sources = typer.Typer(no_args_is_help=True, help="The sources of the data sets.")


@sources.callback()
def _sources() -> None:
    """The sources of the data sets."""


@sources.command()
def preview(
    dataset: Annotated[str, typer.Argument(help="Data set of the configuration, such as B1_glaive.")],
    rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many rows, from the source's first.")] = 3,
) -> None:
    """Show rows as they stand in the source, and what the verifier will see of them."""
    move_to_model_environment()
    from rich.console import Console

    from aerie.prompts.preview import preview as lines_of
    from aerie.settings.machine import settings_path
    from aerie.settings.pipeline import load_settings

    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for line in lines_of(load_settings(settings_path()), dataset, rows):
        console.print(line)
