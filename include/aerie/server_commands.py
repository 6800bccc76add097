"""``./aerie server``: the inference server of this machine, whoever started it."""

import getpass
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aerie.errors import BadInput, Failed
from aerie.serving.plan import Phase
from aerie.stages import Events, StageRequest

if TYPE_CHECKING:
    from rich.table import Table

    from aerie.serving.client import ServerHandle
    from aerie.serving.lease import Lease

app = typer.Typer(no_args_is_help=True, help="The inference server, its keeper and its lease.")

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Owner = Annotated[str | None, typer.Option(help="Who holds it: a run's id, or a name (default: yours on this host).")]


class Terminal(Events):
    """Events of a stage, told to the person at the terminal."""

    def __init__(self) -> None:
        """No file."""

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind in ("progress", "alert"):
            typer.echo(f"aerie: {fields['message']}", err=True)


def me() -> str:
    """Who holds a server that is asked for at this terminal."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def seconds_of(text: str) -> float:
    """A duration such as 90s, 30m or 12h in seconds."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if parts is None or not float(parts[1]):
        raise BadInput(f"--hold {text}: expected a number and s, m, h or d, such as 30m")
    return float(parts[1]) * SECONDS[parts[2]]


@app.command("list")
def list_servers(
    json: Annotated[bool, typer.Option("--json", help="The lease as data, null where there is none.")] = False,
) -> None:
    """Show the server: its state, who holds it until when, who waits for it, and what it is."""
    from aerie.serving import client
    from aerie.settings.machine import server_folder

    lease = client.status(server_folder())
    if json:
        typer.echo("null" if lease is None else lease.model_dump_json(indent=2))
    elif lease is None:
        typer.echo(f"no server of ours runs (folder {server_folder()}){_external()}")
    else:
        from rich.console import Console

        # A pipe is no terminal of 80 columns: nothing is folded there.
        Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(_table(lease))
        if client.find_keeper(server_folder()) is None:
            typer.echo("its keeper is gone: ./aerie server reap ends what it left")


def _external() -> str:
    """What to add where the configuration uses a server of somebody else's."""
    from aerie.settings.machine import settings_path
    from aerie.settings.pipeline import load_settings

    url = load_settings(settings_path()).serving.external_url
    return f"; the configuration uses {url}, which is somebody else's" if url else ""


def _table(lease: "Lease") -> "Table":
    from rich.table import Table

    from aerie.serving.lease import at_time

    busy = "no GPU, or not known" if lease.gpu_utilisation is None else f"{lease.gpu_utilisation:.0%} busy"
    waiting = (f"{one.owner} for {one.phase}, since {at_time(one.since)}" for one in lease.waiting)
    tokens = lease.max_total_num_tokens
    lines = {
        "state": lease.state if lease.error is None else f"{lease.state}: {lease.error}",
        "URL": f"{lease.url} (port {lease.port}) on host {lease.host}",
        "held by": lease.held_by,
        "waiting": "\n".join(waiting) or "nobody",
        "plan": f"{lease.plan.phase}, {lease.plan.model_path} ({lease.plan_fingerprint[:12]})",
        "age": f"{(time.time() - lease.started_at) / 60:,.1f} min, started {at_time(lease.started_at)}",
        "expires": f"{at_time(lease.expires_at)}, unless it is renewed",
        "processes": f"server {lease.server.pid}, keeper {lease.keeper.pid}",
        "KV tokens": "not known yet" if tokens is None else f"{tokens:,}",
        "GPUs": busy,
        "launch": lease.launch_token,
        "log": str(lease.log_path),
    }
    table = Table(show_header=False, box=None)
    for name, value in lines.items():
        table.add_row(name, value)
    return table


@app.command()
def ensure(
    phase: Annotated[Phase, typer.Option(help="What it is for.")] = "generate",
    edition: Annotated[str, typer.Option(help="Edition whose forecast names the layers that capture takes.")] = "main",
    hold: Annotated[str, typer.Option(help="How long it is held without a renewal, such as 90s, 30m or 12h.")] = "30m",
    owner: Owner = None,
    reap_leftovers: Annotated[
        bool, typer.Option("--reap-leftovers", help="End what an earlier server of ours left on the GPUs first.")
    ] = False,
) -> None:
    """Have the configured server, started where it is not there and waited for until it is ready; print its URL.

    It ends when the time is over and nobody else holds it; the same command again holds it anew. With AERIE_KEEPER_URL
    set it is the other host's server, as it was planned there: renewed, or started again where it has failed.
    """
    from aerie.serving import client

    seconds = seconds_of(hold)
    who = owner or me()
    if client.remote_keeper():
        handle = _ensure_there(who, seconds)
    else:
        handle = _ensure_here(phase, edition, who, seconds, reap_leftovers=reap_leftovers)
    if handle.external_identity is None:
        typer.echo(f"aerie: held by {who} for {hold}; ./aerie server stop lets it go", err=True)
    else:
        typer.echo("aerie: it is as planned; it is someone else's, so nothing holds it here", err=True)
    typer.echo(handle.url)


def _ensure_here(phase: Phase, edition: str, owner: str, seconds: float, *, reap_leftovers: bool) -> "ServerHandle":
    """The server that the configuration plans."""
    from aerie.servers import plan_of
    from aerie.serving.configured import ensure_configured
    from aerie.settings.machine import data_root, server_folder, settings_path
    from aerie.settings.pipeline import load_settings

    settings = load_settings(settings_path())
    request = StageRequest(
        settings=settings, data_root=data_root(), server_folder=server_folder(), edition=edition, run_id=owner
    )
    asked = {"lease_seconds": seconds, "reap_leftovers": reap_leftovers or settings.serving.reap_leftovers}
    held = settings.serving.model_copy(update=asked)
    return ensure_configured(
        settings.model_copy(update={"serving": held}),
        plan_of(request, phase),
        folder=server_folder(),
        owner=owner,
        events=Terminal(),
    )


def _ensure_there(owner: str, seconds: float) -> "ServerHandle":
    """The server of a keeper on another host, as it is planned there."""
    from aerie.serving import client
    from aerie.settings.machine import server_folder

    lease = client.status(server_folder())
    if lease is None:
        raise Failed("the keeper at AERIE_KEEPER_URL has no server to renew: ensure one on its host")
    return client.ensure_server(
        lease.plan,
        folder=server_folder(),
        owner=owner,
        python=Path(sys.executable),
        lease_seconds=seconds,
        report=Terminal().progress,
    )


@app.command()
def stop(
    owner: Owner = None,
    force: Annotated[bool, typer.Option("--force", help="End the server, whoever holds it.")] = False,
) -> None:
    """Let the server go: it ends when nobody else holds it, and that nothing of it is left is verified."""
    from aerie.serving import client
    from aerie.settings.machine import server_folder

    who = owner or me()
    before = client.status(server_folder())
    if before is None:
        typer.echo(f"no server of ours runs{_external()}")
        return
    if force:
        client.stop(server_folder(), launch_token=before.launch_token)
        left = None
    else:
        left = client.release(server_folder(), who)
    if left is None:
        typer.echo(f"the server is stopped, nothing of it is left; it was held by {before.held_by}")
    elif who in {holder.owner for holder in before.holders}:
        typer.echo(f"{who} holds the server no more; it stays, held by {left.held_by}")
    else:
        raise Failed(
            f"{who} does not hold the server: it is held by {left.held_by}. --owner NAME ends that hold, --force the "
            "server, whoever works with it"
        )


@app.command()
def reap() -> None:
    """End what a server left whose keeper was killed or whose host was started anew; say what was found and done."""
    from aerie.serving import client
    from aerie.serving.host import host_facts_of
    from aerie.settings.machine import python_of, server_folder

    folder = server_folder()
    if client.find_keeper(folder) is not None:
        lease = client.status(folder)
        what = f"keeps a server held by {lease.held_by}" if lease else "has no server"
        typer.echo(f"nothing to reap: the keeper of {folder} lives and {what}")
        return
    for line in client.reap_left(folder) or [f"nothing was left in {folder}"]:
        typer.echo(line)
    gpus = host_facts_of(python_of("serve")).gpus
    for gpu in gpus:
        for one in gpu.processes:
            name = f"{one.name or 'name not known'}, of {one.owner or 'an unknown owner'}"
            typer.echo(f"GPU {gpu.index} is held by pid {one.pid} ({name}): not of our servers, left alone")
    if not gpus:
        typer.echo("this host has no GPU that can be seen: none was looked at")
