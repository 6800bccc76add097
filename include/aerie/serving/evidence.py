"""What is known of a server that is stuck, gathered before it is ended."""

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from aerie.processes import ProcessIdentity
from aerie.serving.probe import ReadyServer
from aerie.serving.stopping import family_of
from aerie.settings.profile import Frozen

LOG_LINES = 200
ACCESS = re.compile(r'"(?:GET|POST) \S+ HTTP/[\d.]+" \d+')
"""A line of the HTTP server about a request: while a server is stuck, there are only those, of whoever looks at it."""

DUMP_SECONDS = 30.0


class Evidence(Frozen):
    """A server's last log lines but for those of requests, its processes, their stacks, and what it last proved.

    ``stacks`` is None where py-spy is not installed, ``last_probe`` where the server was never ready.
    """

    log_tail: tuple[str, ...]
    processes: tuple[str, ...]
    stacks: str | None
    last_probe: ReadyServer | None


def gather(server: ProcessIdentity, log: Path, last_probe: ReadyServer | None) -> Evidence:
    """Evidence about a server of this host; what cannot be had is said in its place."""
    family = family_of(server)
    return Evidence(
        log_tail=tuple(_last_lines(log)),
        processes=tuple(_described(process) for process in family),
        stacks=_stacks([process.pid for process in family]),
        last_probe=last_probe,
    )


def _last_lines(log: Path) -> Iterable[str]:
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = (line.rstrip() for line in file)
        return deque((line for line in lines if ACCESS.search(line) is None), maxlen=LOG_LINES)


def _described(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            return (
                f"pid {process.pid} {process.name()}: {process.status()}, {process.num_threads()} threads, "
                f"{sum(process.cpu_times()[:2]):.1f} s of CPU, {process.memory_info().rss / 1e9:.2f} GB"
            )
    except psutil.Error as error:
        return f"pid {process.pid}: {error}"


def _stacks(pids: list[int]) -> str | None:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    spy = shutil.which("py-spy", path=places)
    if spy is None:
        return None
    with ThreadPoolExecutor(max(len(pids), 1)) as pool:
        return "\n".join(pool.map(lambda pid: _dump(spy, pid), pids))


def _dump(spy: str, pid: int) -> str:
    command = [spy, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DUMP_SECONDS)
    except subprocess.TimeoutExpired:
        return f"pid {pid}: py-spy gave no stack within {DUMP_SECONDS:.0f} s"
    if done.returncode:
        return f"pid {pid}: py-spy ended with status {done.returncode}: {done.stderr.strip()}"
    return done.stdout
