"""Starting a server process, and waiting until it is ready.

Written from how SGLang fails: a scheduler that dies leaves the HTTP process up for about a minute. So the child and the
log are watched, not only the port.
"""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tenacity

from aerie.ports import free_port
from aerie.processes import ProcessIdentity, die_with_parent
from aerie.serving import probe
from aerie.serving.errors import LaunchFailed, NotReady, ServerDied
from aerie.serving.leftovers import marks
from aerie.serving.plan import ServerPlan
from aerie.serving.server_log import ServerLog

POLL_SECONDS = 0.5
LAUNCH_VARIABLE = "AERIE_LAUNCH_TOKEN"
"""Of all processes of a launch: tells them from later ones with the same pid or session."""


@dataclass(frozen=True)
class Launched:
    """A server process that this process started. ``token`` is the server's model name: it proves who answers."""

    process: subprocess.Popen[bytes]
    identity: ProcessIdentity
    url: str
    port: int
    token: str
    log: ServerLog

    def require_alive(self) -> None:
        """Raise when the process has ended or its log says that it is over.

        Raises:
            OutOfMemory: its memory did not suffice; the class says for what.
            MachineNotReady: another process was faster to take its port.
            ServerDied: of anything else.
        """
        status = self.process.poll()
        self.log.read()
        if status is None and not self.log.over:
            return
        if status is None or self.log.over:
            how = "lost a worker process"
        else:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        explanation = self.log.explain(status)
        kind = ServerDied if explanation.error is LaunchFailed else explanation.error
        raise kind(f"server {self.url} {how}: {explanation}")


def advertised(host: str) -> str:
    """The name under which others reach a server bound to ``host``."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound


def start_server(plan: ServerPlan, *, python: Path, folder: Path) -> Launched:
    """Start the server of a plan in a session of its own, with its log in ``folder/logs``; it is not ready yet.

    Call it from a thread that lives as long as the server may: the kernel ends the server when that thread ends.
    """
    port = plan.port or free_port(plan.host)
    token = f"launch-{secrets.token_hex(8)}"
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"server-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{plan.phase}-{token[-6:]}.log"
    command = [*plan.command_line(python, port=port), "--served-model-name", token, "--weight-version", token]
    with log.open("wb") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=logs,
            env={**os.environ, **plan.environment(), **marks(folder), LAUNCH_VARIABLE: token},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    identity = ProcessIdentity.of(process.pid)
    url = f"http://{advertised(plan.host)}:{port}"
    return Launched(process=process, identity=identity, url=url, port=port, token=token, log=ServerLog(log))


def wait_until_ready(
    launched: Launched,
    plan: ServerPlan,
    *,
    folder: Path,
    timeout_seconds: float,
    wanted: Callable[[], bool] = lambda: True,
) -> probe.ReadyServer:
    """Wait until the server passes the probe.

    Args:
        launched: the process, from ``start_server``.
        plan: what it must turn out to be.
        folder: the server's, for the probe.
        timeout_seconds: how long to wait.
        wanted: asked before each attempt; False gives up at once.

    Raises:
        LaunchFailed: it ended, or its log says that it will not come up, or nobody wants it any more; OutOfMemory, a
            kind of it, when that is why.
        MachineNotReady: another process was faster to take its port.
        WrongServer: what answers is not what was planned.
        NotReady: it is still not ready after ``timeout_seconds``.
    """

    def attempt() -> probe.ReadyServer:
        if not wanted():
            raise LaunchFailed(f"server {launched.url} was given up while it started (log: {launched.log.path})")
        try:
            launched.require_alive()
        except ServerDied as death:
            raise LaunchFailed(str(death)) from death
        return probe.probe(launched.url, plan, launched.token, folder=folder)

    try:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NotReady),
            stop=tenacity.stop_after_delay(timeout_seconds),
            wait=tenacity.wait_fixed(POLL_SECONDS),
            reraise=True,
        )(attempt)
    except NotReady as last:
        reached = f"; it got as far as: {launched.log.progress[-1]}" if launched.log.progress else ""
        raise NotReady(
            f"server not ready after {timeout_seconds:g} s: {last}{reached} (log: {launched.log.path})"
        ) from last
