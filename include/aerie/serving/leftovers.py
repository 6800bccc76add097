"""Processes that a server of ours left behind: known by the mark in the environment that it was started with.

A worker that outlives its parent may have another session and parent by then; its environment it keeps.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from aerie.processes import ProcessIdentity, stop_trees
from aerie.serving.errors import ProcessesLeft

FOLDER_VARIABLE = "AERIE_SERVER_OF_FOLDER"
"""Of a server's processes alone; ``AERIE_SERVER_FOLDER`` is a setting that every process on its way may have."""
GRACE_SECONDS = 5.0


def marks(folder: Path) -> Mapping[str, str]:
    """Variables that mark all processes of a server of this folder.

    SGLang renames its workers; without SPT_NOENV the new name overwrites what the kernel tells of their environment.
    """
    return {FOLDER_VARIABLE: str(folder.resolve()), "SPT_NOENV": "1"}


def is_of(folder: Path, pid: int) -> bool:
    """Whether a process was started by a server of this folder; one of another user's is not."""
    try:
        return psutil.Process(pid).environ().get(FOLDER_VARIABLE) == str(folder.resolve())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def leftovers_of(folder: Path) -> list[psutil.Process]:
    """All processes that were started by a server of this folder; leftovers where none of it runs."""
    return [process for process in psutil.process_iter() if is_of(folder, process.pid)]


def end_leftovers(folder: Path, pids: Collection[int]) -> None:
    """End processes of this folder's servers, and all that they started.

    Raises:
        ProcessesLeft: some survive; the message names them.
    """
    identities = [identity for pid in pids if is_of(folder, pid) and (identity := ProcessIdentity.of_or_none(pid))]
    if left := stop_trees(identities, grace_seconds=GRACE_SECONDS):
        raise ProcessesLeft(
            f"processes {', '.join(map(str, left))} of an earlier server of {folder} are still there after SIGKILL: "
            "expected none; restart the machine"
        )
