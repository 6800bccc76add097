"""The lease: who holds a server, where it runs, and until when. One file in one folder per server.

The keeper alone writes it (atomically); whoever finds it after a crash recognises leftovers by pid and creation time.
"""

import socket
import time
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from aerie.artefacts.files import write_text
from aerie.errors import BadInput
from aerie.processes import ProcessIdentity
from aerie.serving.plan import ServerPlan
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


class Lease(OfHost):
    """A server and its holder.

    Times are in seconds since 1970. ``gpu_utilisation`` is the share of the time that the host's GPUs were busy when
    the lease was renewed, None where there are none.
    """

    schema_version: Literal[1] = 1
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
    owner: str
    max_total_num_tokens: int | None = None
    gpu_utilisation: float | None = None
    started_at: float
    renewed_at: float
    expires_at: float

    @property
    def has_expired(self) -> bool:
        """Whether its time is over."""
        return time.time() > self.expires_at


class KeeperAddress(OfHost):
    """Where a keeper answers; written when it listens."""

    keeper: ProcessIdentity
    url: str


def lease_path(folder: Path) -> Path:
    """The lease."""
    return folder / "lease.json"


def address_path(folder: Path) -> Path:
    """The keeper's address."""
    return folder / "keeper.json"


def token_path(folder: Path) -> Path:
    """The keeper's bearer token, readable by its user only."""
    return folder / "keeper.token"


def lock_path(folder: Path) -> Path:
    """Locked by the keeper for as long as it lives: two never share a folder."""
    return folder / "keeper.lock"


def read_lease(folder: Path) -> Lease | None:
    """The lease in a folder, or None when there is none.

    Raises:
        BadInput: the file is there and is not a lease.
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
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BadInput(f"{path}: not a {kind.__name__}: {error}; remove it once no server of it runs") from error
