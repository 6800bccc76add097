"""The lease: who holds a server, where it runs, and until when. One file in one folder per server.

The keeper alone writes it (atomically); whoever finds it after a crash recognises leftovers by pid and creation time.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from aerie.artefacts.files import write_text
from aerie.artefacts.observations import Observation
from aerie.errors import BadInput, one_line
from aerie.processes import ProcessIdentity
from aerie.serving.plan import Phase, ServerPlan
from aerie.settings.profile import Frozen

State = Literal["starting", "ready", "failed"]
LOCKED_EXIT_CODE = 3
"""Exit code of a keeper that finds another one in its folder."""

Model = TypeVar("Model", bound=Frozen)


class OfHost(Frozen):
    """Something with processes, which only their own host can see."""

    host: str

    @property
    def is_of_this_host(self) -> bool:
        """Whether its processes can be seen from here."""
        return self.host == socket.gethostname()


class Holder(Frozen):
    """Who holds a server: a run (its phases are one owner) or a person. Times are in seconds since 1970."""

    owner: str
    since: float
    renewed_at: float
    expires_at: float


class Waiting(Frozen):
    """Who waits for the server to be free, and for which phase."""

    owner: str
    phase: Phase
    since: float


class Lease(OfHost):
    """A server and its holders.

    Times are in seconds since 1970; ``expires_at`` is that of the hold that lasts longest. ``gpu_utilisation`` is the
    share of the time that the host's GPUs were busy when the lease was renewed, None where there are none;
    ``gpu_memory_before`` the bytes in use of each GPU just before the launch, which a stop must come back to.
    ``progress`` tells the start line by line, and ``reduction`` in what the plan is smaller than the one asked for, and
    why.
    """

    schema_version: Literal[2] = 2
    boot_id: str
    keeper: ProcessIdentity
    server: ProcessIdentity
    state: State
    error: str | None = None
    url: str
    port: int
    launch_token: str
    plan_fingerprint: str
    plan: ServerPlan
    log_path: Path
    holders: tuple[Holder, ...]
    waiting: tuple[Waiting, ...] = ()
    max_total_num_tokens: int | None = None
    observation: Observation | None = None
    gpu_utilisation: float | None = None
    progress: tuple[str, ...] = ()
    reduction: str | None = None
    gpu_memory_before: tuple[int, ...] = ()
    started_at: float
    renewed_at: float
    expires_at: float

    @property
    def has_expired(self) -> bool:
        """Whether its time is over."""
        return time.time() > self.expires_at

    @property
    def held_by(self) -> str:
        """The holders and how long they hold it, for people."""
        return ", ".join(f"{one.owner} (until {at_time(one.expires_at)})" for one in self.holders) or "nobody"


class KeeperAddress(OfHost):
    """Where a keeper answers; written when it listens."""

    keeper: ProcessIdentity
    url: str


def at_time(seconds: float) -> str:
    """A time as people read it, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def lease_path(folder: Path) -> Path:
    """The lease."""
    return folder / "lease.json"


def address_path(folder: Path) -> Path:
    """The keeper's address."""
    return folder / "keeper.json"


def token_path(folder: Path) -> Path:
    """The keeper's bearer token, readable by its user only."""
    return folder / "keeper.token"


def given_token() -> str | None:
    """The token that a keeper and those of other hosts who ask it share, None where none was given to this process.

    It is in ``AERIE_KEEPER_TOKEN``, or in the file that ``AERIE_KEEPER_TOKEN_FILE`` names.

    Raises:
        BadInput: the file cannot be read, or is empty.
    """
    token, file = os.environ.get("AERIE_KEEPER_TOKEN"), os.environ.get("AERIE_KEEPER_TOKEN_FILE")
    if token or not file:
        return token or None
    try:
        token = Path(file).read_text().strip()
    except OSError as error:
        raise BadInput(f"AERIE_KEEPER_TOKEN_FILE {file}: {error.strerror}") from error
    if not token:
        raise BadInput(f"AERIE_KEEPER_TOKEN_FILE {file}: the file is empty: expected the keeper's token")
    return token


def lock_path(folder: Path) -> Path:
    """Locked by the keeper for as long as it lives: two never share a folder."""
    return folder / "keeper.lock"


@contextmanager
def locked(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[bool]:
    """Hold the folder's lock for the block; yields whether it could be had: a keeper has it for as long as it lives."""
    deadline = time.monotonic() + wait_seconds
    with lock_path(folder).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.1)
        yield True


def read_lease(folder: Path) -> Lease | None:
    """The lease in a folder, or None when there is none.

    Raises:
        BadInput: the file is there and is not a lease, or is one of another version of Aerie.
    """
    return _read(Lease, lease_path(folder))


def read_address(folder: Path) -> KeeperAddress | None:
    """The keeper's address in a folder, or None when there is none.

    Raises:
        BadInput: the file is there and is not an address.
    """
    return _read(KeeperAddress, address_path(folder))


def write(model: Frozen, path: Path) -> None:
    """Write a lease or an address atomically."""
    write_text(path, model.model_dump_json(indent=2) + "\n")


def _read(kind: type[Model], path: Path) -> Model | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}; run as the user whose server it is") from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        wrong = _other_version(content) or f"not a {kind.__name__}: {one_line(error)}"
        raise BadInput(f"{path}: {wrong}{REMOVE}") from error


REMOVE = "; remove it once no server of it runs"


def _other_version(content: bytes) -> str | None:
    """What to say of a lease that another version of Aerie wrote, None where it is not one."""
    try:
        document = json.loads(content)
        version, pid = document["schema_version"], document["server"]["pid"]
    except (ValueError, TypeError, KeyError):
        return None
    expected = Lease.model_fields["schema_version"].default
    if version == expected:
        return None
    return (
        f"a lease of schema version {version}, written by another version of Aerie (expected {expected}): "
        f"its server was process {pid} of host {document.get('host', '?')}. Stop it with the Aerie that started it, or "
        "end that process"
    )
