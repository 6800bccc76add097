"""One run at a time for what it writes, told by lock files: the kernel opens one when its holder ends, however it ends.

A stage that works on a data set holds the data set's lock; one that works on the whole edition holds the edition's.
``merge`` shares the locks of the data sets that it reads, so that none of them changes under it. The locks lie beside
the data, in a folder of their own, and hold who has them for people.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from aerie.artefacts.layout import EditionFiles
from aerie.errors import Busy


@contextmanager
def lock_file(path: Path, *, what: str, holder: str, shared: bool = False) -> Iterator[None]:
    """Hold a file's lock for as long as this process lives; ``shared`` lets others share it.

    Args:
        path: the lock file; it is made where it is not there, and stays.
        what: what is worked on under it, for the message.
        holder: who works on it, such as ``run manual__1, generate``.
        shared: whether others may share it.

    Raises:
        Busy: another process holds it; the message names its holder, process and host, and since when.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            other = file.read().strip() or "another process"
            raise Busy(f"{what} is being worked on by {other}: wait until it ends, or stop it") from error
        since = datetime.now(UTC)
        file.truncate(0)
        file.write(f"{holder} (process {os.getpid()} on {socket.gethostname()}, since {since:%Y-%m-%d %H:%M:%S UTC})\n")
        file.flush()
        yield


def dataset_lock(
    files: EditionFiles, dataset: str, *, holder: str, shared: bool = False
) -> AbstractContextManager[None]:
    """Hold a data set of an edition, as ``lock_file``."""
    what = f"data set {dataset} of edition {files.edition}"
    return lock_file(files.lock(dataset), what=what, holder=holder, shared=shared)


@contextmanager
def edition_lock(files: EditionFiles, *, holder: str, reads: Sequence[str] = ()) -> Iterator[None]:
    """Hold what an edition has beside its data sets, and share the data sets that are read, as ``lock_file``."""
    with ExitStack() as held:
        held.enter_context(lock_file(files.lock(), what=f"edition {files.edition}", holder=holder))
        for dataset in reads:
            held.enter_context(dataset_lock(files, dataset, holder=holder, shared=True))
        yield


@contextmanager
def rank_lock(files: EditionFiles, *, rank: int, world_size: int, holder: str) -> Iterator[None]:
    """Hold what one rank of a shared capture writes, and share the edition with the other ranks, as ``lock_file``."""
    what = f"edition {files.edition}"
    with (
        lock_file(files.lock(), what=what, holder=holder, shared=True),
        lock_file(
            files.rank_lock(rank, world_size),
            what=f"rank {rank} of {world_size} of the capture of {what}",
            holder=holder,
        ),
    ):
        yield
