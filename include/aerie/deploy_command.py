"""``./aerie deploy``: the verifier served with a drafter, as its benchmark recommends. Heavy imports stay inside."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aerie.errors import BadInput

if TYPE_CHECKING:
    from aerie.artefacts.drafter_record import DrafterRecord
    from aerie.serving.client import ServerHandle
    from aerie.serving.plan import ServerPlan
    from aerie.settings.pipeline import DraftSettings, PipelineSettings

RENEWALS_PER_LEASE = 4
POLL_SECONDS = 1.0
SHAPES = ("hidden_size", "vocab_size")
"""What a drafter's configuration shares with its verifier's."""


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter on this machine; ``record`` None: one that was not made here."""

    folder: Path
    record: "DrafterRecord | None"


def deploy(
    drafter: Annotated[
        str, typer.Argument(help="Id in the registry, beginning of a fingerprint, edition, or ./FOLDER.")
    ],
    only_print: Annotated[bool, typer.Option("--print", help="Print the server's command and start nothing.")] = False,
    steps: Annotated[int | None, typer.Option(help="Draft steps (default: as the benchmark recommends).")] = None,
    topk: Annotated[int | None, typer.Option(help="Branches of a draft.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Tokens of a draft, with the verifier's own.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: the configuration's).")] = None,
    hold: Annotated[
        str | None, typer.Option(help="Come back at once and hold the server so long, such as 12h.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A configuration that ships (default: AERIE_CONFIG).")] = None,
    config: Annotated[Path | None, typer.Option(help="A configuration's file.")] = None,
) -> None:
    """Serve the verifier with a drafter, until Ctrl-C or ./aerie server stop; print the URL."""
    from aerie.serving.plan import checkpoint_identity
    from aerie.settings.machine import data_root
    from aerie.stage_commands import chosen_settings

    settings = with_port(chosen_settings(preset, config), port)
    found = find_drafter(drafter, settings, data_root())
    require_same_verifier(found, settings)
    draft = draft_settings(found, settings, {"num_steps": steps, "eagle_topk": topk, "num_draft_tokens": draft_tokens})
    plan = plan_of(found, draft, settings, identity=checkpoint_identity(found.folder))
    name = found.record.drafter_id if found.record else found.folder.name
    _say(f"drafter {name} in {found.folder}: {draft.words}")
    if only_print:
        typer.echo(command_text(plan))
        return
    _serve(settings, plan, hold)


def with_port(settings: "PipelineSettings", port: int | None) -> "PipelineSettings":
    """The configuration with another port for its server, where one is given."""
    if port is None:
        return settings
    return settings.model_copy(update={"serving": settings.serving.model_copy(update={"port": port})})


def find_drafter(named: str, settings: "PipelineSettings", root: Path) -> FoundDrafter:
    """A drafter by its id, the beginning of its fingerprint, its edition (the newest published one), or its folder.

    A folder is what has a slash, ``.`` or ``..``: any other name may be that of a folder here by chance. Published
    drafters are looked at before what an edition has exported.

    Raises:
        BadInput: there is none, or more than one is meant; the message lists those that there are.
    """
    from aerie.artefacts.drafter_record import read_record

    if "/" in named or named in (".", ".."):
        folder = Path(named).resolve()
        if not (folder / "config.json").is_file():
            raise BadInput(f"{folder}: expected the folder of a drafter, with config.json and model.safetensors")
        return FoundDrafter(folder, read_record(folder))
    known = known_drafters(settings, root)
    records = [(one, one.record) for one in known if one.record is not None]
    by_id = [one for one, record in records if named in (record.drafter_id, record.fingerprint)]
    by_edition = [one for one, record in records if record.edition == named]
    by_fingerprint = [one for one, record in records if record.fingerprint.startswith(named)]
    for matches in (by_id, by_edition[:1], by_fingerprint):
        if len({one.record.fingerprint for one in matches if one.record}) > 1:
            names = ", ".join(one.record.drafter_id for one in matches if one.record)
            raise BadInput(f"drafter {named!r} may be {names}: give more of its fingerprint")
        if matches:
            return matches[0]
    there = ", ".join(record.drafter_id for _, record in records) or "none"
    elsewhere = f"./{named}" if Path(named, "config.json").is_file() else "its folder, with a slash"
    raise BadInput(
        f"no drafter {named!r} in {settings.publish.folder} or the editions of {root}; there are {there}. One "
        f"that lies elsewhere is named by {elsewhere}"
    )


def known_drafters(settings: "PipelineSettings", root: Path) -> list[FoundDrafter]:
    """Drafters with a record: the published ones, newest first, then those that editions have exported."""
    from aerie.artefacts.drafter_record import RECORD_FILE, read_record

    published = sorted(settings.publish.folder.glob(f"*/{RECORD_FILE}"), key=_time, reverse=True)
    exported = sorted(root.glob(f"editions/*/drafter/{RECORD_FILE}"), key=_time, reverse=True)
    return [
        FoundDrafter(path.parent.resolve(), read_record(path.parent))
        for path in (*published, *exported)
        if not path.parent.name.startswith(".")
    ]


def _time(path: Path) -> float:
    return path.stat().st_mtime


def require_same_verifier(found: FoundDrafter, settings: "PipelineSettings") -> None:
    """Refuse a drafter of another model than the one that the configuration serves.

    Raises:
        BadInput: it is; both are named. Of a drafter without a record only its shapes can tell.
    """
    from aerie.hidden_states.checkpoint import checkpoint_fingerprint
    from aerie.serving.model_config import read_model_config

    verifier = settings.verifier
    if (record := found.record) is not None:
        here = checkpoint_fingerprint(verifier.path)
        if record.verifier.fingerprint != here:
            raise BadInput(
                f"drafter {record.drafter_id} is for {record.verifier.name} (fingerprint "
                f"{record.verifier.fingerprint[:12]}), but configuration {settings.name} serves {verifier.path} "
                f"({here[:12]}): it would accept next to nothing. Set verifier.path to its model"
            )
        return
    drafter, model = read_model_config(found.folder), read_model_config(verifier.path)
    if "speculators_model_type" in drafter.outer:
        raise BadInput(
            f"{found.folder}: this is speculators' layout, which vLLM serves; expected SGLang's, which of a published "
            "drafter is the folder above"
        )
    _say(f"{found.folder} has no aerie.json: whose drafter it is cannot be told but by its shapes")
    for name in SHAPES:
        if drafter.fields.get(name) != model.fields.get(name):
            raise BadInput(
                f"{found.folder}: {name} is {drafter.fields.get(name)}, but {verifier.path} has "
                f"{model.fields.get(name)}: it is another model's drafter"
            )


def draft_settings(
    found: FoundDrafter, settings: "PipelineSettings", asked: "dict[str, int | None]"
) -> "DraftSettings":
    """How much is drafted: as asked, else as the drafter's benchmark recommends, else as the configuration measures.

    Raises:
        BadInput: a value that cannot be, or the benchmark recommends none and none is asked for in full.
    """
    from pydantic import ValidationError

    from aerie.errors import one_line
    from aerie.settings.pipeline import DraftSettings

    recommended = found.record.draft if found.record else None
    if recommended is None and found.record and "benchmark" in found.record.stages:
        needed = {**asked, "num_draft_tokens": 0} if asked["eagle_topk"] == 1 else asked
        if None in needed.values():
            raise BadInput(
                f"the benchmark of {found.record.drafter_id} recommends no draft setting: each that it tried changed "
                "the verifier's output. Measure others (benchmark.sweep) and publish again; to serve one all the same, "
                "name it by --steps and --topk, and with a --topk above 1 --draft-tokens"
            )
    elif recommended is None:
        _say("no benchmark recommends how much to draft: taking the configuration's own setting")
    source = recommended or settings.benchmark
    chosen = {name: getattr(source, name) if value is None else value for name, value in asked.items()}
    if asked["num_draft_tokens"] is None and chosen["eagle_topk"] == 1:
        chosen["num_draft_tokens"] = chosen["num_steps"] + 1
    try:
        return DraftSettings.model_validate(chosen)
    except ValidationError as error:
        raise BadInput(f"--steps, --topk, --draft-tokens: {one_line(error)}") from error


def plan_of(
    found: FoundDrafter, draft: "DraftSettings", settings: "PipelineSettings", *, identity: str
) -> "ServerPlan":
    """The server: the verifier as it is served everywhere, with this drafter.

    Raises:
        BadInput: it cannot be.
    """
    from pydantic import ValidationError

    from aerie.errors import one_line
    from aerie.serving.configured import plan_configured
    from aerie.serving.plan import DrafterPlan

    try:
        drafter = DrafterPlan(path=found.folder, identity=identity, **draft.model_dump())
    except ValidationError as error:
        raise BadInput(f"{found.folder}: {one_line(error)}") from error
    return plan_configured(settings, "deploy", drafter=drafter)


def command_text(plan: "ServerPlan") -> str:
    """The server's command line with its variables, to be copied into a shell."""
    from aerie.plans import DEFAULT_PORT
    from aerie.settings.machine import python_of

    variables = [f"{name}={shlex.quote(value)}" for name, value in plan.environment().items()]
    command = plan.command_line(python_of("serve"), port=plan.port or DEFAULT_PORT)
    return " ".join([*variables, shlex.join(command)])


def _serve(settings: "PipelineSettings", plan: "ServerPlan", hold: str | None) -> None:
    """Have the server, print its URL, and hold it: for so long, or until the command ends.

    Raises:
        BadInput: the configuration uses someone else's server: nothing is started beside it.
        AerieError: the server does not come up, or fails.
    """
    from aerie.server_commands import Terminal, me, seconds_of
    from aerie.serving import client
    from aerie.serving.configured import ensure_configured
    from aerie.settings.machine import server_folder
    from aerie.stage_commands import ended_cleanly

    if (url := settings.serving.external_url) is not None:
        raise BadInput(f"the configuration uses {url}, which is somebody else's: give its owner what --print says")
    owner, folder = me(), server_folder()
    if hold is not None:
        held = settings.serving.model_copy(update={"lease_seconds": int(seconds_of(hold))})
        settings = settings.model_copy(update={"serving": held})
    with ended_cleanly("the server is let go; the same command starts it again"):
        try:
            handle = ensure_configured(settings, plan, folder=folder, owner=owner, events=Terminal())
            typer.echo(handle.url)
            if hold is None:
                _say("serving until Ctrl-C, or ./aerie server stop")
                _keep(handle, settings.serving.lease_seconds)
        finally:
            if hold is None:
                client.release(folder, owner)
    _say(f"held by {owner} for {hold}; ./aerie server stop lets it go")


def _keep(handle: "ServerHandle", lease_seconds: float) -> None:
    """Renew the hold until somebody stops the server.

    Raises:
        AerieError: the server failed, or its keeper does.
    """
    from aerie.serving import client
    from aerie.serving.errors import KeeperUnreachable, LeaseLost

    renewed = time.monotonic()
    while True:
        try:
            if time.monotonic() - renewed > lease_seconds / RENEWALS_PER_LEASE:
                client.renew(handle, lease_seconds=lease_seconds)
                renewed = time.monotonic()
            lease = client.status(handle.folder)
        except LeaseLost:
            if time.monotonic() - renewed > lease_seconds:
                raise
            lease = None  # it was let go, and not for want of a renewal
        except KeeperUnreachable:
            if client.find_keeper(handle.folder) is not None:
                raise
            lease = None  # it ended while it was asked
        if lease is None or lease.launch_token != handle.launch_token:
            _say("the server was stopped")
            raise typer.Exit
        time.sleep(POLL_SECONDS)


def _say(message: str) -> None:
    typer.echo(f"aerie: {message}", err=True)
