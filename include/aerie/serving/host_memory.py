"""A host's memory as a CPU server sees it: what is free, and what other processes took while a server started."""

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import psutil
import tenacity

from aerie.processes import ProcessIdentity
from aerie.serving.stopping import family_of

CGROUP = Path("/sys/fs/cgroup")
NUMA_NODES = Path("/sys/devices/system/node")
SETTLED_BYTES = 8 << 20
SETTLE_SECONDS = 3.0
SAMPLE_SECONDS = 0.4

Stage = Literal["starting", "loading", "over"]

OWN_MEMORY = re.compile(r"^(?:Pss_Anon|Pss_Shmem):\s+(\d+) kB", re.M)
PAGE_TABLES = re.compile(r"^VmPTE:\s+(\d+) kB", re.M)


def available_bytes() -> int:
    """Free memory as SGLang 0.5.23 reads it for a CPU server (``srt/utils/common.py``, ``get_available_gpu_memory``).

    It is psutil's available memory, or what the container's memory limit leaves where that is less, and of it the share
    of one NUMA node.
    """
    free = psutil.virtual_memory().available
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    nodes = [path for path in NUMA_NODES.glob("node[0-9]*/cpulist") if path.read_text().strip()]
    return free // max(1, len(nodes))


def settled_available_bytes() -> int:
    """Free memory once it stands still, or as it is after a few seconds: what ended gives back its memory late."""
    last = available_bytes()

    def read_again() -> tuple[int, bool]:
        nonlocal last
        before, last = last, available_bytes()
        return last, abs(last - before) < SETTLED_BYTES

    settling = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda reading: not reading[1]),
        stop=tenacity.stop_after_delay(SETTLE_SECONDS),
        wait=tenacity.wait_fixed(SAMPLE_SECONDS),
        retry_error_callback=lambda _: (last, False),
    )
    return settling(read_again)[0]


def memory_of(server: ProcessIdentity) -> int:
    """Bytes that a server's processes have taken from the free memory: their own and shared pages, and page tables."""
    total = 0
    for process in family_of(server):
        folder = Path("/proc") / str(process.pid)
        try:
            texts = (folder / "smaps_rollup").read_text(), (folder / "status").read_text()
        except OSError:  # it ended while it was looked at
            continue
        pages = [*OWN_MEMORY.findall(texts[0]), *PAGE_TABLES.findall(texts[1])]
        total += 1024 * sum(map(int, pages))
    return total


def stage_of(log: str) -> Stage:
    """Where SGLang's start is: before, between or after the two readings of memory that its pool depends on."""
    if "Load weight end" in log:
        return "over"
    return "loading" if "Memory baseline taken" in log else "starting"


@dataclass(frozen=True)
class Taken:
    """Bytes that other processes took (negative: gave back) while a server started, before and while it loaded."""

    before_loading_bytes: int
    while_loading_bytes: int

    def as_before_launch(self, fraction: float) -> int:
        """The same as if it had been taken before the launch: what is taken while loading counts whole in the pool."""
        return round(self.before_loading_bytes + self.while_loading_bytes / fraction)


class OtherProcesses:
    """Watches, in a thread, what everything but one server takes of the host's memory while the server starts."""

    def __init__(self, server: ProcessIdentity, log: Path, before_launch_bytes: int) -> None:
        self._server = server
        self._log = log
        self._readings: dict[Stage, list[int]] = {"starting": [before_launch_bytes], "loading": [], "over": []}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host memory", daemon=True)

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End watching."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            stage = self._stage()
            if stage == "over":
                return
            reading = available_bytes() + memory_of(self._server)
            if self._stage() == stage:  # else the server moved on while this was read
                self._readings[stage].append(reading)

    def _stage(self) -> Stage:
        return stage_of(self._log.read_text(errors="replace"))

    @property
    def taken(self) -> Taken:
        """What was taken until the weights were loaded, or until now."""
        starting, loading = self._readings["starting"], self._readings["loading"]
        at_baseline = loading[0] if loading else starting[-1]
        at_end = loading[-1] if loading else at_baseline
        return Taken(starting[0] - at_baseline, at_baseline - at_end)


def _number(path: Path) -> int | None:
    """The number in a file of the kernel's; None where there is no such file, or no number ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
