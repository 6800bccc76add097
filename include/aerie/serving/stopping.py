"""Ending a server with everything that it spawned, and verifying that nothing of it is left.

SIGKILL on SGLang's main process leaves workers that hold memory, so the end is checked process by process, and then by
what they held: the port, and the memory of the GPUs. Processes are told by pid, creation time and launch token, never
by name.
"""

import signal
import time
from collections.abc import Callable, Iterable, Sequence

import psutil

from aerie.ports import port_is_free
from aerie.processes import ProcessIdentity, descendants_of, runs, send_signal_to, session_of
from aerie.serving.errors import ProcessesLeft
from aerie.serving.host import Gpu, host_facts
from aerie.serving.launch import LAUNCH_VARIABLE

GRACE_SECONDS = 30.0
"""How long a server may take to end after SIGTERM."""

KILL_SECONDS = 10.0
PORT_SECONDS = 10.0
GPU_SECONDS = 60.0
"""How long the driver may take to give back the memory of processes that are gone."""

GPU_TOLERANCE_BYTES = 256 * 2**20
"""Drivers and other users of a GPU come and go by less; a worker that is left holds more."""

GIB = 2**30


def family_of(server: ProcessIdentity, launch_token: str | None = None) -> list[psutil.Process]:
    """Processes of the launch that run: of the server's session, whoever their parent is by now, and its descendants.

    Without a launch token the caller is the server's parent, which alone can be sure that pid and session are still
    the server's. With one, a process that merely has them now is not among those returned.
    """
    leader = server.find()
    if leader is not None and not _is_of(leader, launch_token):
        return []
    family = {process.pid: process for process in session_of(server)}
    if leader is None:  # then the session's number may have been given out again
        family = {pid: process for pid, process in family.items() if _is_of(process, launch_token)}
    else:
        family |= {process.pid: process for process in [leader, *descendants_of(leader)]}
    return _alive(family.values())


def _is_of(process: psutil.Process, launch_token: str | None) -> bool:
    """Whether the process was started by this launch: the token is in its command line, or in its environment."""
    if launch_token is None:
        return True
    try:
        return launch_token in process.cmdline() or process.environ().get(LAUNCH_VARIABLE) == launch_token
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def stop_server(server: ProcessIdentity, launch_token: str, *, grace_seconds: float) -> list[int]:
    """End a server: SIGTERM to its main process, then SIGKILL to all that is left, then look again.

    Returns:
        The pids that were ended.

    Raises:
        ProcessesLeft: processes survive; the message names them.
    """
    family = {process.pid: process for process in family_of(server, launch_token)}
    if server.pid in family:
        send_signal_to(family[server.pid], signal.SIGTERM)
        _wait_until(lambda: not _alive(family.values()), grace_seconds)

    def killed() -> bool:
        family.update({process.pid: process for process in family_of(server, launch_token)})
        left = _alive(family.values())
        for process in left:
            send_signal_to(process, signal.SIGKILL)
        return not left

    if not _wait_until(killed, KILL_SECONDS):
        left = ", ".join(map(_described, _alive(family.values())))
        raise ProcessesLeft(
            f"processes of server {server.pid} are still there after SIGKILL: {left}; expected none: they may hold GPU "
            "memory, end them before the next launch"
        )
    return sorted(family)


def gpu_memory_in_use() -> tuple[int, ...]:
    """Bytes in use of each GPU of this host, by index; empty where there are none."""
    return tuple(gpu.used_bytes for gpu in host_facts().gpus)


def require_released(*, host: str, port: int, gpu_memory_before: Sequence[int]) -> None:
    """Require that what a server held is free again, now that its processes are gone.

    Args:
        host: address that it listened on.
        port: of that address.
        gpu_memory_before: bytes in use of each GPU just before it was launched; empty where there are none.

    Raises:
        ProcessesLeft: the port is taken, or the GPUs hold more than before; names the processes that hold it.
    """
    if not _wait_until(lambda: port_is_free(port, host), PORT_SECONDS):
        raise ProcessesLeft(
            f"{host}:{port} is still taken {PORT_SECONDS:g} s after the server's processes ended, by "
            f"{_listener(port)}: expected it free"
        )
    if gpu_memory_before and not _wait_until(lambda: not _fuller(gpu_memory_before), GPU_SECONDS):
        raise ProcessesLeft(
            f"the GPUs hold more than before the launch {GPU_SECONDS:g} s after the server's processes ended: "
            f"{'; '.join(_fuller(gpu_memory_before)) or 'no longer'}; expected the level of before: end what holds it"
        )


def _fuller(before: Sequence[int]) -> list[str]:
    """GPUs that hold more than before, each with who holds it."""
    return [
        f"GPU {gpu.index}: {gpu.used_bytes / GIB:.2f} GiB, {before[gpu.index] / GIB:.2f} before, held by "
        + _holders(gpu)
        for gpu in host_facts().gpus
        if gpu.index < len(before) and gpu.used_bytes > before[gpu.index] + GPU_TOLERANCE_BYTES
    ]


def _holders(gpu: Gpu) -> str:
    return (
        ", ".join(
            f"pid {one.pid} ({one.name or 'name not known'}, of {one.owner or 'an unknown owner'}"
            + (")" if one.memory_bytes is None else f", {one.memory_bytes / GIB:.2f} GiB)")
            for one in gpu.processes
        )
        or "no process that can be seen from here"
    )


def _listener(port: int) -> str:
    try:
        pids = {one.pid for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid}
    except psutil.AccessDenied:
        pids = set()
    return ", ".join(f"pid {pid}" for pid in sorted(pids)) or "a process of another user"


def _described(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} ({process.name()}, of {process.username()})"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}"


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if runs(process)]
