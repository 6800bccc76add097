"""The commands around the judge: ``validate``, ``show`` and ``import-responses``. Heavy imports stay inside them."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from aerie.errors import BadInput, Failed

_MOVED = "AERIE_MOVED_TO_MODEL_ENVIRONMENT"


def validate(
    files: Annotated[
        list[Path], typer.Argument(help="JSON lines (also .gz, .zst) or Parquet; - is the standard input.")
    ],
    profile: Annotated[str, typer.Option(help="Profile of the verifier's family.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="The verifier's checkpoint folder, for the rules that need text.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the checkpoint's own tokenizer code run; needs --revision.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Commit of the checkpoint.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one verdict a row as JSON.")] = False,
) -> None:
    """Judge responses made with any tool; exit 0 all kept, 1 some not, 2 a row or a file cannot be read."""
    if tokenizer is None and (trust_remote_code or revision is not None):
        raise BadInput("--trust-remote-code and --revision say how --tokenizer is loaded: name its folder")
    if tokenizer is not None:
        move_to_model_environment()
    from aerie.boundary.files import FileJudge
    from aerie.boundary.validating import validate_files

    judge = FileJudge.of(profile, tokenizer=tokenizer, trust_remote_code=trust_remote_code, revision=revision)
    raise typer.Exit(validate_files(files, judge, as_json=json, say=say))


def show(
    sample: Annotated[str, typer.Argument(help="Sample id.")],
    edition: Annotated[str, typer.Option(help="Edition of the sample.")] = "main",
    dataset: Annotated[str | None, typer.Option(help="Data set of the sample (default: look in all).")] = None,
) -> None:
    """Show one sample: prompt, reasoning, boundary, answer, tool calls, end, and what is trained (underlined)."""
    move_to_model_environment()
    from rich.console import Console

    from aerie.artefacts.layout import EditionFiles
    from aerie.boundary.showing import find_sample, lines_of
    from aerie.settings.machine import data_root, settings_path
    from aerie.settings.pipeline import load_settings

    settings = load_settings(settings_path())
    found = find_sample(sample, files=EditionFiles(data_root(), edition), settings=settings, dataset=dataset)
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for line in lines_of(found):
        console.print(line)


def import_responses(
    file: Annotated[Path, typer.Argument(help="JSON lines (also .gz, .zst) or Parquet, with output_ids.")],
    dataset: Annotated[str, typer.Option(help="Data set whose prompts the responses answer.")],
    edition: Annotated[str, typer.Option(help="Edition to take them into.")] = "main",
    made_with: Annotated[
        Path | None, typer.Option(help="What they were made with, in the form of the edition's generation.json.")
    ] = None,
    allow_unknown_provenance: Annotated[
        bool, typer.Option("--allow-unknown-provenance", help="Take them though not all of that is known; recorded.")
    ] = False,
) -> None:
    """Take responses made with other scripts into an edition; exit 1 some refused, 2 some unreadable."""
    from aerie.generation.importing import import_responses as import_file
    from aerie.generation.importing import lines_of
    from aerie.generation.provenance import read_statement
    from aerie.settings.machine import data_root, server_folder, settings_path
    from aerie.settings.pipeline import load_settings
    from aerie.stages import StageRequest

    request = StageRequest(
        settings=load_settings(settings_path()),
        data_root=data_root(),
        server_folder=server_folder(),
        edition=edition,
        dataset=dataset,
        run_id="import-responses",
    )
    stated = read_statement(made_with) if made_with else {}
    report = import_file(file, request, stated=stated, allow_unknown=allow_unknown_provenance, say=say)
    for line in lines_of(report, file):
        typer.echo(line)
    raise typer.Exit(report.exit_code)


def say(message: str) -> None:
    """Tell the person at the terminal something."""
    typer.echo(f"aerie: {message}", err=True)


def move_to_model_environment() -> None:
    """Go on as the model environment's Python, which has the tokenizers, unless this is it.

    Raises:
        BadInput: the environment has not been made.
        Failed: it has no tokenizers.
    """
    if find_spec("transformers") is not None:
        return
    from aerie.settings.machine import python_of, variables_of

    python = str(python_of("model"))
    if os.environ.get(_MOVED):
        raise Failed(f"{sys.executable}: the model environment has no transformers; run ./aerie setup")
    sys.stdout.flush()
    sys.stderr.flush()
    command = [python, "-m", "aerie", *sys.argv[1:]]
    os.execve(python, command, {**variables_of("model"), _MOVED: "1"})  # noqa: S606 - no shell is meant
