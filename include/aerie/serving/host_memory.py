"""A host's memory as a CPU server sees it: what is free, and what other processes took while a server started."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import psutil
import tenacity

from aerie.processes import ProcessIdentity
from aerie.serving.host import memory_available_bytes
from aerie.serving.stopping import family_of

NUMA_NODES = Path("/sys/devices/system/node")
SETTLED_BYTES = 8 << 20
SETTLE_SECONDS = 3.0
POLL_SECONDS = 0.04
SETTLE_POLL_SECONDS = 0.4
FAMILY_SECONDS = 0.5
SAME_MOMENT_BYTES = 1 << 20
POOL_BEGUN_BYTES = 12 << 20
"""A server that has so much more than a moment ago, when its weights were there, is filling its pool."""

Stage = Literal["starting", "loading", "over"]


def available_bytes() -> int:
    """Free memory as SGLang 0.5.23 reads it for a CPU server (``srt/utils/common.py``, ``get_available_gpu_memory``).

    It is psutil's available memory, or what the container's memory limit leaves where that is less, and of it the share
    of one NUMA node.
    """
    nodes = [path for path in NUMA_NODES.glob("node[0-9]*/cpulist") if path.read_text().strip()]
    return memory_available_bytes() // max(1, len(nodes))


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
        wait=tenacity.wait_fixed(SETTLE_POLL_SECONDS),
        retry_error_callback=lambda _: (last, False),
    )
    return settling(read_again)[0]


def memory_of(processes: Sequence[psutil.Process]) -> int:
    """Bytes that processes have taken from the free memory: their own pages, not those of files."""
    total = 0
    for process in processes:
        try:
            memory = process.memory_info()
        except psutil.NoSuchProcess:  # it ended while it was looked at
            continue
        total += memory.rss - memory.shared
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


@dataclass(frozen=True)
class _Reading:
    """Free memory of the host, and what the server has of the rest, at one moment."""

    available: int
    own: int


class OtherProcesses:
    """Watches, in a thread, what everything but one server takes of the host's memory while the server starts.

    On a busy host free memory moves fast, so it is read often, up to the moments at which SGLang reads it: its log
    tells of the baseline and of the weights, and the pool that begins to fill of the last one.
    """

    def __init__(self, server: ProcessIdentity, log: Path, before_launch_bytes: int) -> None:
        self._server = server
        self._log = log
        self._before_launch = self._baseline = self._end = _Reading(before_launch_bytes, own=0)
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
        before: Stage = "starting"
        family, family_read = family_of(self._server), time.monotonic()
        while not self._done.wait(POLL_SECONDS):
            if time.monotonic() - family_read > FAMILY_SECONDS:
                family, family_read = family_of(self._server), time.monotonic()
            reading = self._read(family)
            stage = stage_of(self._log.read_text(errors="replace"))
            if reading is None or stage == "starting":
                continue
            if before == "starting":
                self._baseline = reading
            elif stage == "over" and reading.own > self._end.own + POOL_BEGUN_BYTES:
                return
            self._end, before = reading, stage

    def _read(self, family: Sequence[psutil.Process]) -> _Reading | None:
        """Both figures of one moment; None when the server took memory between the two."""
        own = memory_of(family)
        available = available_bytes()
        return _Reading(available, own) if abs(memory_of(family) - own) < SAME_MOMENT_BYTES else None

    @property
    def taken(self) -> Taken:
        """What was taken until the pool was sized, or until now."""
        moved = [
            (before.available - after.available) - (after.own - before.own)
            for before, after in ((self._before_launch, self._baseline), (self._baseline, self._end))
        ]
        return Taken(*moved)
