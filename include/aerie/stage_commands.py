"""The pipeline's stages as commands, each alone: ``./aerie merge``, ``vocabulary``, ``train`` and so on.

A command asks the same stage the same way as its Airflow task, in the stage's own environment, shows its events in the
terminal, and records them in the store where there is one. Heavy imports stay inside.
"""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from aerie.errors import BadInput, one_line
from aerie.settings.pipeline import PipelineSettings

if TYPE_CHECKING:
    from aerie.stages import StageRequest, StageResult
    from aerie.store.connection import Connection

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it; 143 after SIGTERM."""
USERS_OF_SERVER = ("generate", "capture", "benchmark")
"""Stages that have a server, and whose command lets it go at its end."""


@dataclass(frozen=True)
class Setting:
    """An option that changes one field of the configuration for this command; its text is read by ``read``."""

    option: str
    section: str
    field: str
    kind: type
    help: str
    read: Callable[[Any], Any] = lambda given: given

    @property
    def name(self) -> str:
        """Name of the option as a parameter."""
        return self.option.removeprefix("--").replace("-", "_")


def _numbers(text: str) -> tuple[str, ...]:
    """Numbers with commas between; whether they are some, the configuration says."""
    return tuple(text.split(","))


def _paths(path: Path) -> tuple[Path, ...]:
    return (path.absolute(),)


@dataclass(frozen=True)
class StageCommand:
    """A stage's command: its help, its own options, and the kind of data set that it goes through, if any."""

    stage: str
    help: str
    settings: tuple[Setting, ...] = ()
    kinds: tuple[str, ...] = ()
    named: str | None = None

    @property
    def name(self) -> str:
        """What is typed after ``./aerie``."""
        return self.named or self.stage


COMMANDS = (
    StageCommand("prepare", "Make prompt ids of a source's rows.", kinds=("generated",)),
    StageCommand("import", "Take over a data set that is tokenised already.", kinds=("tokenised",)),
    StageCommand("generate", "Have the verifier answer the prompts; starts its server.", kinds=("generated",)),
    StageCommand("validate", "Judge an edition's responses.", kinds=("generated", "tokenised"), named="judge"),
    StageCommand("merge", "Merge, shuffle and deduplicate the judged data sets into one corpus."),
    StageCommand(
        "vocabulary",
        "Choose the draft vocabulary from the corpus' token frequencies.",
        (
            Setting("--coverage", "vocabulary", "coverage", float, "Share of response tokens, such as 0.99, to cover."),
            Setting("--size", "vocabulary", "size", int, "Tokens; with a coverage the most of them."),
        ),
    ),
    StageCommand("forecast", "Say what the hidden states will take; exit 1 where rows are broken or they do not fit."),
    StageCommand(
        "capture",
        "Capture the hidden states of every corpus row; starts its server.",
        (
            Setting("--backend", "hidden_states", "backend", str, "sglang, transformers or vllm."),
            Setting("--world-size", "hidden_states", "world_size", int, "Ranks that share the rows."),
            Setting(
                "--rank", "hidden_states", "rank", int, "The rank to capture; none takes all ranks' files together."
            ),
        ),
    ),
    StageCommand(
        "train",
        "Train the drafter, or go on with it where it was ended.",
        (Setting("--epochs", "training", "epochs", int, "Epochs in all."),),
    ),
    StageCommand("export", "Export the drafter for the server, every tensor read back."),
    StageCommand(
        "benchmark",
        "Measure the exported drafter and judge it; starts its servers. Exit 1 where it fails.",
        (
            Setting("--concurrency", "benchmark", "concurrency", str, "Requests at once, such as 1,8,32.", _numbers),
            Setting(
                "--prompts",
                "benchmark",
                "prompts_files",
                Path,
                "Prompts of your own, JSON lines, beside the split.",
                _paths,
            ),
        ),
    ),
    StageCommand("publish", "Copy the drafter that passed its benchmark to its destination, with its card."),
)

COMMON: Mapping[str, tuple[Any, Any]] = {
    "edition": (Annotated[str, typer.Option(help="Edition to work on.")], "main"),
    "preset": (Annotated[str | None, typer.Option(help="A configuration that ships (default: AERIE_CONFIG).")], None),
    "config": (Annotated[Path | None, typer.Option(help="A configuration's file.")], None),
    "force": (Annotated[bool, typer.Option("--force", help="Do it though it is done already.")], False),
    "json": (Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")], False),
}
DATASET = Annotated[list[str] | None, typer.Option(help="Only this data set; may be given again (default: all).")]


def add_to(app: typer.Typer) -> None:
    """Add every command to the command line."""
    for command in COMMANDS:
        app.command(command.name)(_function(command))


def _function(command: StageCommand) -> Callable[..., None]:
    """The function of a command, with the parameters that typer reads options from."""

    def run(*, edition: str, preset: str | None, config: Path | None, force: bool, json: bool, **asked: Any) -> None:
        datasets = asked.pop("dataset", None)
        settings = with_settings(chosen_settings(preset, config), command, asked)
        for dataset in datasets_of(settings, command, datasets):
            result = run_stage(command.stage, settings, edition=edition, dataset=dataset, force=force)
            typer.echo(result.model_dump_json(indent=2, by_alias=True) if json else summary_of(result, dataset))

    own = {
        one.name: (Annotated[one.kind | None, typer.Option(one.option, help=one.help)], None)
        for one in command.settings
    }
    parameters = {**({"dataset": (DATASET, None)} if command.kinds else {}), **own, **COMMON}
    run.__doc__ = command.help
    run.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in parameters.items()
        ]
    )
    return run


def chosen_settings(preset: str | None, config: Path | None) -> PipelineSettings:
    """The configuration that a command is given, else the one in use.

    Raises:
        BadInput: two are given, or it cannot be read.
    """
    from aerie.settings.machine import settings_path
    from aerie.settings.pipeline import load_settings
    from aerie.settings.presets import preset_path

    if preset is not None and config is not None:
        raise BadInput(f"--preset {preset} and --config {config} are two configurations: give one")
    if preset is not None:
        return load_settings(preset_path(preset))
    return load_settings(config or settings_path())


def with_settings(settings: PipelineSettings, command: StageCommand, asked: Mapping[str, Any]) -> PipelineSettings:
    """The configuration with what a command's own options change.

    Raises:
        BadInput: a value that the configuration could not have either.
    """
    for one in command.settings:
        if (given := asked[one.name]) is None:
            continue
        section = getattr(settings, one.section)
        try:
            changed = type(section).model_validate({**section.model_dump(), one.field: one.read(given)})
        except (ValidationError, ValueError) as error:
            told = one_line(error) if isinstance(error, ValidationError) else error
            raise BadInput(f"{one.option} {given}: {told}") from error
        settings = settings.model_copy(update={one.section: changed})
    return settings


def datasets_of(settings: PipelineSettings, command: StageCommand, named: list[str] | None) -> tuple[str | None, ...]:
    """The data sets that a command goes through, one after the other; None where its stage works on no single one.

    Raises:
        BadInput: there is no such data set, or it is not of the command's kind.
    """
    if not command.kinds:
        return (None,)
    if not named:
        return tuple(key for key, one in settings.datasets.items() if one.kind in command.kinds)
    for key in named:
        if (kind := settings.dataset(key).kind) not in command.kinds:
            raise BadInput(f"--dataset {key} is {kind}: ./aerie {command.name} is for {' and '.join(command.kinds)}")
    return tuple(named)


def summary_of(result: "StageResult", dataset: str | None) -> str:
    """What a stage did, as one line."""
    brief = result.brief
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in {**brief["counts"], **brief["data"]}.items())
    of = f" {dataset}" if dataset else ""
    return f"{result.stage}{of}: {'done earlier' if result.reused else 'done'}{': ' if figures else ''}{figures}"


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def run_stage(
    stage: str, settings: PipelineSettings, *, edition: str, dataset: str | None = None, force: bool = False
) -> "StageResult":
    """Run one stage as its task would, shown in the terminal and recorded in the store where there is one.

    Its server, if it has one, is let go at the end, however it ends.

    Raises:
        AerieError: what the stage raises.
        typer.Exit: it was interrupted; it has ended, and the same command goes on from what it kept.
    """
    from rich.console import Console

    from aerie.pipeline import stage_request
    from aerie.settings.machine import run_folder

    began = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    run_id = f"command__{stage}__{began}_{os.getpid()}"
    request = stage_request(
        settings, _parameters(settings, edition, force=force), run_id=run_id, dataset=dataset, stage=stage
    )
    folder, console = run_folder(run_id), Console(stderr=True)
    with (
        ended_cleanly(f"stage {stage} was interrupted and has ended; the same command goes on from what it kept"),
        _store() as connection,
    ):
        try:
            return _run(stage, request, folder / stage, connection, console)
        finally:
            if stage in USERS_OF_SERVER:
                _run("serve_stop", request, folder / "serve_stop", connection, console)


def _parameters(settings: PipelineSettings, edition: str, *, force: bool) -> Any:
    from aerie.pipeline import run_parameters

    form = {"edition": edition, "force": force, "datasets": tuple(settings.datasets), "from": "prepare", "to": None}
    return run_parameters(form, backfill=False)


def _run(
    stage: str, request: "StageRequest", folder: Path, connection: "Connection | None", console: Any
) -> "StageResult":
    from aerie.recording import record_event, record_result
    from aerie.stage_display import shown
    from aerie.stage_process import StageProcess
    from aerie.store.queries.alerts import record_alert

    title = f"{stage} {request.dataset}" if request.dataset else stage
    with shown(title, console) as show:

        def on_event(event: Mapping[str, Any]) -> None:
            show(event)
            if connection is not None:
                record_event(connection, stage, request, event)
                if event["type"] == "alert":
                    record_alert(
                        connection,
                        reason=event["reason"],
                        message=event["message"],
                        run_id=request.run_id,
                        edition=request.edition,
                        dataset=request.dataset,
                        stage=stage,
                    )

        result = StageProcess(stage, request, folder, on_event).run()
    if connection is not None:
        record_result(connection, request, result)
    return result


@contextmanager
def _store() -> "Iterator[Connection | None]":
    """The store, for the duration of the block; None, and said, where none is set or the local stack's does not run.

    Raises:
        Retryable: the one that AERIE_DATABASE_URL names cannot be reached.
    """
    from aerie.local.configuration import StackConfiguration, configuration_path
    from aerie.store.connection import connected

    url = os.environ.get("AERIE_DATABASE_URL")
    if not url and configuration_path().exists():
        stack = StackConfiguration.load_or_make()
        url = stack.database_url if stack.cluster.running_port() is not None else None
    if not url:
        _say("no database is set and no local stack runs: nothing is recorded but the files")
        yield None
        return
    os.environ["AERIE_DATABASE_URL"] = url  # for stages of the control side
    with connected(url, application="aerie command") as connection:
        yield connection


@contextmanager
def ended_cleanly(said: str) -> Iterator[None]:
    """Have SIGTERM end the block as Ctrl-C does, with all that is to be done at its end; say how it ended.

    Raises:
        typer.Exit: it was interrupted.
    """

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        _say(said)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(message: str) -> None:
    typer.echo(f"aerie: {message}", err=True)
