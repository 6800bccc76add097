"""Processes by pid and creation time, never by name."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel, ConfigDict

PR_SET_PDEATHSIG = 1
CREATION_TIME_TOLERANCE_SECONDS = 0.01


class ProcessIdentity(BaseModel):
    """A process that cannot be mistaken for a later one with the same pid. ``created`` is in seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """Identity of a running process.

        Raises:
            psutil.NoSuchProcess: there is none with this pid.
        """
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    @classmethod
    def of_or_none(cls, pid: int) -> Self | None:
        """Identity of a process, or None when there is none with this pid."""
        try:
            return cls.of(pid)
        except psutil.NoSuchProcess:
            return None

    def find(self) -> psutil.Process | None:
        """The process, or None when it is gone (a zombie counts as gone)."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < CREATION_TIME_TOLERANCE_SECONDS
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def boot_id() -> str:
    """Identity of this boot of the host; no process of an earlier one runs."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies (for ``preexec_fn``)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def session_of(leader: ProcessIdentity) -> Iterator[psutil.Process]:
    """Processes of the session that a process began, itself among them, and others when it is gone.

    Sessions have numbers, which are given out again: of a leader that is long gone ask for more than this.
    """
    for process in psutil.process_iter():
        try:
            in_session = os.getsid(process.pid) == leader.pid
            if in_session and process.create_time() > leader.created - CREATION_TIME_TOLERANCE_SECONDS:
                yield process
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue


def stop_trees(identities: Sequence[ProcessIdentity], *, grace_seconds: float) -> list[int]:
    """Stop processes with all their descendants: SIGTERM to the roots, then SIGKILL to whatever is left.

    Returns the pids that are still there afterwards (none, unless the kernel holds one).
    """
    roots = [process for identity in identities if (process := identity.find())]
    family = {process.pid: process for root in roots for process in [root, *descendants_of(root)]}
    for root in roots:
        send_signal_to(root, signal.SIGTERM)
    _wait(list(family.values()), grace_seconds)
    for root in roots:
        family.update({process.pid: process for process in descendants_of(root)})
    for process in family.values():
        send_signal_to(process, signal.SIGKILL)
    return [process.pid for process in _wait(list(family.values()), 5)]


def descendants_of(process: psutil.Process) -> list[psutil.Process]:
    """Children of a process and theirs; none when it is gone."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def send_signal_to(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may be gone by now; never to this one."""
    try:
        if process.pid != os.getpid():
            process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _wait(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if runs(process)]


def runs(process: psutil.Process) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(identity: ProcessIdentity, seconds: float) -> bool:
    """Wait until a process is gone; False when it is still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    while identity.find():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
