"""Having a server: ensure it through its keeper, hold it, let it go. Used from every environment.

A server belongs to a folder (of the lease, the keeper's token and the logs); each folder has one at a time. It is
shared by the owners that want the same plan; who wants another one waits until nobody holds it any more.
"""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests
import tenacity
from pydantic import ValidationError

from aerie.artefacts.observations import Observation
from aerie.errors import AerieError, BadInput, one_line
from aerie.processes import wait_until_gone
from aerie.serving import errors, external
from aerie.serving.errors import KeeperEnding, KeeperUnreachable, LeaseLost, NotReady, ServerBusy, ServerDied
from aerie.serving.evidence import Evidence
from aerie.serving.lease import (
    LOCKED_EXIT_CODE,
    KeeperAddress,
    Lease,
    address_path,
    given_token,
    lease_path,
    locked,
    read_address,
    read_lease,
    token_path,
)
from aerie.serving.plan import ServerPlan
from aerie.serving.preflight import AS_MEASURED, PreflightOptions
from aerie.serving.reaping import reap
from aerie.serving.stopping import GRACE_SECONDS
from aerie.settings.machine import variables_of

KEEPER_START_SECONDS = 60.0
REQUEST_TIMEOUT_SECONDS = 120.0
TIMEOUTS_SECONDS = {"/ensure": 300.0, "/stop": 300.0, "/status": 30.0}
"""What may end a server first takes up to 30 s of grace, 10 s of killing, 70 s until port and GPUs are free."""
KEEPER_END_SECONDS = 30.0
KILLED_SECONDS = 10.0  # a killed keeper's lock goes with the last of its threads
DYING_SECONDS = 1.0  # a process that is killed closes its connections before it is gone
POLL_SECONDS = 1.0
QUEUE_SECONDS = 7 * 24 * 3600.0
"""How long to wait while others hold the server: longer than any phase of the reference deployment takes."""
POOLED_QUEUE_SECONDS = 60.0
"""The same for tasks that have a slot of the server's pool: who holds the server may need it to come to an end."""
REPORT_SECONDS = 60.0
SAID_CHARACTERS = 200
GIVEN = "AERIE_KEEPER_TOKEN or AERIE_KEEPER_TOKEN_FILE"

ERRORS: Mapping[str, type[AerieError]] = {
    "BadInput": BadInput,
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AerieError)},
}


@dataclass(frozen=True)
class ServerHandle:
    """A ready server: where it answers, which launch it is, the folder whose keeper keeps it, and who holds it.

    One that someone else owns has an ``external_identity``, and no log that can be read from here.
    """

    url: str
    launch_token: str
    folder: Path
    owner: str
    log_path: Path | None
    max_total_num_tokens: int
    observation: Observation | None
    reused: bool
    external_identity: str | None = None


class Keeper:
    """A keeper that answers."""

    def __init__(self, url: str, token: str, *, origin: str) -> None:
        self._url = url
        self._origin = origin
        self._headers = {"Authorization": f"Bearer {token}"}

    def status(self) -> Lease | None:
        """The lease as it stands, None when the keeper has no server."""
        return self._call("GET", "/status", None)

    def ensure(self, body: Mapping[str, Any]) -> Lease:
        """``POST /ensure``."""
        return self._expect(self._call("POST", "/ensure", body))

    def renew(self, launch_token: str, *, owner: str, lease_seconds: float) -> Lease:
        """``POST /renew``."""
        body = {"launch_token": launch_token, "owner": owner, "lease_seconds": lease_seconds}
        return self._expect(self._call("POST", "/renew", body))

    def stop(self, *, owner: str | None, launch_token: str | None = None) -> Lease | None:
        """``POST /stop``; returns the lease that others still hold."""
        return self._call("POST", "/stop", {"owner": owner, "launch_token": launch_token})

    def evidence(self, launch_token: str) -> Evidence:
        """``GET /evidence``."""
        return Evidence.model_validate(self._ask("GET", f"/evidence?launch_token={launch_token}", None))

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Lease | None:
        answer = self._ask(method, path, body)
        try:
            return None if answer is None else Lease.model_validate(answer)
        except ValidationError as error:
            raise KeeperUnreachable(f"{self._url}{path}: not a lease: {one_line(error)}; is it a keeper?") from error

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        url = self._url + path
        timeout = TIMEOUTS_SECONDS.get(path, REQUEST_TIMEOUT_SECONDS)
        try:
            response = requests.request(method, url, json=body, headers=self._headers, timeout=timeout)
        except requests.RequestException as error:
            raise KeeperUnreachable(f"{url}: the keeper does not answer: {error}") from error
        if response.status_code == requests.codes.unauthorized:
            raise KeeperUnreachable(f"{url}: refuses the token of {self._origin}: it was replaced")
        try:
            answer = response.json()
            failure = None if response.ok else (answer["error"], answer["message"])
        except (ValueError, KeyError, TypeError) as error:
            said = response.text[:SAID_CHARACTERS]
            raise KeeperUnreachable(
                f"{url}: status {response.status_code} and no answer of a keeper's: {said!r}; is it one? keeper.log "
                "of its folder has what went wrong there"
            ) from error
        if failure is not None:
            name, message = failure
            raise ERRORS.get(name, errors.NotReady)(message)
        return answer

    def _expect(self, lease: Lease | None) -> Lease:
        if lease is None:
            raise KeeperUnreachable(f"{self._url}: expected a lease, got none")
        return lease


def remote_keeper() -> Keeper | None:
    """The keeper of another host that ``AERIE_KEEPER_URL`` names, None where it is not set.

    Raises:
        BadInput: there is no token (``aerie.serving.lease.given_token``).
    """
    url = os.environ.get("AERIE_KEEPER_URL")
    if not url:
        return None
    token = given_token()
    if token is None:
        raise BadInput(
            "AERIE_KEEPER_URL is set without a token: set AERIE_KEEPER_TOKEN, or AERIE_KEEPER_TOKEN_FILE to a copy of "
            "the keeper.token on its host"
        )
    return Keeper(url.rstrip("/"), token, origin=GIVEN)


def find_keeper(folder: Path) -> Keeper | None:
    """The keeper of a folder, or None when there is none (or it was killed); that of ``remote_keeper`` if it is set.

    Raises:
        KeeperUnreachable: one is there and does not answer.
    """
    if (remote := remote_keeper()) is not None:
        remote.status()  # no process of its host can be seen from here: it answers, or it does not
        return remote
    address = read_address(folder)
    if address is None:
        return None
    if address.is_of_this_host and address.keeper.find() is None:
        return None
    keeper = _keeper_at(address, folder)
    try:
        keeper.status()
    except KeeperUnreachable:
        if address.is_of_this_host and wait_until_gone(address.keeper, DYING_SECONDS):  # it ended while it was asked
            return None
        raise
    return keeper


def _keeper_at(address: KeeperAddress, folder: Path) -> Keeper:
    if (given := given_token()) is not None:
        return Keeper(address.url, given, origin=GIVEN)
    path = token_path(folder)
    try:
        return Keeper(address.url, path.read_text().strip(), origin=str(path))
    except OSError as error:
        raise KeeperUnreachable(
            f"{path}: {error.strerror}: run as the user who started it, or give both a token in AERIE_KEEPER_TOKEN_FILE"
        ) from error


def ensure_server(
    plan: ServerPlan,
    *,
    folder: Path,
    owner: str,
    python: Path | None,
    keeper_stays: bool = False,
    lease_seconds: float = 300.0,
    start_timeout_seconds: float = 3600.0,
    queue_seconds: float = QUEUE_SECONDS,
    preflight: PreflightOptions = AS_MEASURED,
    report: Callable[[str], None] = lambda _: None,
) -> ServerHandle:
    """Hold a ready server of this plan: shared if there is one, started if not, waited for while others hold another.

    Args:
        plan: what it must be.
        folder: its lease, logs and keeper.
        owner: who holds it. Whoever gives the same name is the same holder: the tasks of a run give the run's.
        python: the serve environment's interpreter, for the keeper and the server; None where they run on another
            host: a keeper must be there then.
        keeper_stays: whether a keeper that this starts stays when a hold runs out, for those of other hosts.
        lease_seconds: how long the owner holds it without a renewal; waiting here renews.
        start_timeout_seconds: how long it may take to become ready, once it is the owner's turn.
        queue_seconds: how long to wait while others hold the server for another plan.
        preflight: what the settings say of the server's host.
        report: told one line when the server is started, each stage of its start, and one line each minute while it
            loads or is waited for.

    Raises:
        BadInput: a checkpoint's files are not whole.
        PlanRefused: the plan does not fit the server's host.
        MachineNotReady: the disk, the port or processes on the GPUs stand in the way.
        LaunchFailed: it ended, or cannot come up.
        NotReady: it did not become ready in time.
        WrongServer: what came up is not what was planned.
        ServerDied: it was ready, and died while this waited.
        KeeperUnreachable: the keeper does not start or does not answer.
        LeaseElsewhere: another host holds the folder's lease.
        LeaseLost: somebody else stopped the server meanwhile.
        ServerBusy: others held the server for another plan all the time that it was waited for.
    """
    body = {
        "plan": plan.model_dump(mode="json"),
        "owner": owner,
        "lease_seconds": lease_seconds,
        "start_timeout_seconds": start_timeout_seconds,
        "preflight": preflight.model_dump(mode="json"),
    }

    def ask() -> tuple[Keeper, Lease | None, Lease]:
        keeper = find_or_start_keeper(folder, python, plan.host, stays=keeper_stays)
        return keeper, keeper.status(), keeper.ensure(body)

    keeper, before, lease = _when_free(ask, queue_seconds, report)
    reused = before is not None and before.launch_token == lease.launch_token
    if not reused:
        report(f"starting {plan.phase} server {lease.url} (log: {lease.log_path})")
    lease = _wait_until_ready(keeper, lease, owner, lease_seconds, start_timeout_seconds, report)
    if lease.max_total_num_tokens is None:
        raise NotReady(f"{lease_path(folder)}: ready, but without max_total_num_tokens")
    return ServerHandle(
        url=lease.url,
        launch_token=lease.launch_token,
        folder=folder,
        owner=owner,
        log_path=lease.log_path,
        max_total_num_tokens=lease.max_total_num_tokens,
        observation=lease.observation,
        reused=reused,
    )


Asked = TypeVar("Asked")


def _when_free(ask: Callable[[], Asked], queue_seconds: float, report: Callable[[str], None]) -> Asked:
    """Ask until it is our turn, reporting at first and each minute who is before us."""
    asking = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(KeeperEnding),
        stop=tenacity.stop_after_delay(KEEPER_END_SECONDS),
        wait=tenacity.wait_fixed(POLL_SECONDS),
        reraise=True,
    )
    started, reported = time.monotonic(), float("-inf")
    while True:
        try:
            return asking(ask)
        except ServerBusy as busy:
            if time.monotonic() - started > queue_seconds:
                raise
            if time.monotonic() - reported > REPORT_SECONDS:
                report(f"waiting for the server: {busy}")
                reported = time.monotonic()
            time.sleep(POLL_SECONDS)


def _wait_until_ready(
    keeper: Keeper,
    lease: Lease,
    owner: str,
    lease_seconds: float,
    timeout_seconds: float,
    report: Callable[[str], None],
) -> Lease:
    started, reported = time.monotonic(), time.monotonic()
    told = len(lease.progress) if lease.state == "ready" else 0  # how a shared server came up was told to others
    while True:
        for line in lease.progress[told:]:
            report(f"server {lease.url}: {line}")
        told = len(lease.progress)
        if lease.state != "starting":
            return _require_alive(lease)
        # The keeper gives up first and says why; this is for a keeper that has lost its mind.
        if time.monotonic() - started > timeout_seconds + KEEPER_START_SECONDS:
            raise NotReady(f"server {lease.url} is still starting after {timeout_seconds:g} s (log: {lease.log_path})")
        if time.monotonic() - reported > REPORT_SECONDS:
            report(f"server {lease.url} is starting, {time.monotonic() - started:.0f} s so far (log: {lease.log_path})")
            reported = time.monotonic()
        time.sleep(POLL_SECONDS)
        lease = keeper.renew(lease.launch_token, owner=owner, lease_seconds=lease_seconds)


def _require_alive(lease: Lease) -> Lease:
    if lease.state == "failed":
        name, _, message = (lease.error or "").partition(": ")
        kind = ERRORS.get(name, ServerDied)
        if issubclass(kind, errors.OutOfMemory) and lease.max_total_num_tokens is not None:
            kind = ServerDied  # it was ready: what it did is worth trying again, on the smaller server that comes next
        raise kind(message or f"server {lease.url} failed (log: {lease.log_path})")
    return lease


def find_or_start_keeper(folder: Path, python: Path | None, host: str, *, stays: bool) -> Keeper:
    """The keeper of a folder, started where there is none.

    Args:
        folder: of the lease, the keeper's token and the logs.
        python: the serve environment's interpreter; None: it is another host's, and not started from here.
        host: address to listen on.
        stays: whether one that is started stays when a hold runs out.

    Raises:
        KeeperUnreachable: it does not answer, does not start, or is another host's and not there.
    """
    keeper = find_keeper(folder)
    if keeper is not None:
        return keeper
    if python is None:
        raise KeeperUnreachable(
            f"{address_path(folder)}: no keeper is there, and none can be started from {socket.gethostname()}: the "
            "server's host starts it in the task start_server_* of the run; clear that one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "keeper.log"
    process = _start_keeper(folder, python, host, log, stays=stays)

    def attempt() -> Keeper:
        nonlocal process
        found = find_keeper(folder)
        if found is None:
            fate = _fate(process)
            if process.poll() == LOCKED_EXIT_CODE:  # another one was there, and may have been ending
                process = _start_keeper(folder, python, host, log, stays=stays)
            raise KeeperUnreachable(f"{folder}: no keeper yet, its process {fate}: {_last_line(log)}")
        return found

    def undecided(error: BaseException) -> bool:
        return isinstance(error, KeeperUnreachable) and process.poll() in (None, LOCKED_EXIT_CODE)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(undecided),
        stop=tenacity.stop_after_delay(KEEPER_START_SECONDS),
        wait=tenacity.wait_fixed(0.2),
        reraise=True,
    )(attempt)


def _start_keeper(folder: Path, python: Path, host: str, log: Path, *, stays: bool) -> subprocess.Popen[bytes]:
    command = [str(python), "-m", "aerie.serving.keeper", "--root", str(folder), "--host", host]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "--stay"] if stays else command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables_of("serve"),
            start_new_session=True,
        )


def _fate(process: subprocess.Popen[bytes]) -> str:
    status = process.poll()
    return "runs" if status is None else f"ended with status {status}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it logged nothing'} (log: {log})"


def use_external(url: str, plan: ServerPlan, *, folder: Path, owner: str) -> ServerHandle:
    """Use a server that someone else owns, once it has shown to be as planned.

    Raises:
        NotReady: it does not answer.
        WrongServer: it is another one than planned, or answers nonsense.
    """
    found = external.examine(url, plan, folder=folder)
    return ServerHandle(
        url=url,
        launch_token=f"external-{found.identity[:16]}",
        folder=folder,
        owner=owner,
        log_path=None,
        max_total_num_tokens=found.max_total_num_tokens,
        observation=None,
        reused=True,
        external_identity=found.identity,
    )


def renew(handle: ServerHandle, *, lease_seconds: float = 300.0) -> float | None:
    """Hold the server for longer; one that someone else owns must merely be there, and be the same.

    Returns:
        Share of the time that the GPUs of its host were busy lately; None where there are none, or it is not known.

    Raises:
        NotReady: someone else's server does not answer.
        LeaseLost: there is no keeper or no server any more, it is another launch, or the hold was not renewed in time.
        ServerDied, LaunchFailed, ...: the server has failed; the error says why.
        KeeperUnreachable: the keeper does not answer.
    """
    if handle.external_identity is not None:
        external.require_same(handle.url, handle.external_identity)
        return None
    keeper = find_keeper(handle.folder)
    if keeper is None:
        raise LeaseLost(
            f"{address_path(handle.folder)}: the keeper of {handle.launch_token} is gone, and its server with it"
        )
    lease = _require_alive(keeper.renew(handle.launch_token, owner=handle.owner, lease_seconds=lease_seconds))
    return lease.gpu_utilisation


@contextmanager
def held(handle: ServerHandle, *, lease_seconds: float = 300.0) -> Iterator[None]:
    """Renew the lease in the background for the duration of the block.

    Raises:
        AerieError: after a block that succeeded, why the last renewal failed, if it did: the server was gone before
            the work was done.
    """
    done = threading.Event()
    failure: list[AerieError] = []

    def keep_renewing() -> None:
        while not done.wait(lease_seconds / 4):
            try:
                renew(handle, lease_seconds=lease_seconds)
                failure.clear()
            except AerieError as error:
                failure[:] = [error]

    thread = threading.Thread(target=keep_renewing, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failure:
        raise failure[0]


def stop(folder: Path, *, launch_token: str | None = None) -> bool:
    """End the folder's server, whoever holds it, and its keeper, and verify that nothing is left.

    Args:
        folder: of the lease.
        launch_token: end only this launch; None ends whichever is there.

    Returns:
        Whether there was anything to end.

    Raises:
        LeaseLost: another launch than the one named is there.
        ProcessesLeft: its processes survive.
        KeeperUnreachable: the keeper does not answer.
    """
    keeper = find_keeper(folder)
    if keeper is None:
        return _end_what_is_left(folder)
    address = read_address(folder)
    keeper.stop(owner=None, launch_token=launch_token)
    _wait_for_keeper(address)
    return True


def release(folder: Path, owner: str) -> Lease | None:
    """End an owner's hold, or its waiting. The last one ends the server and its keeper, and verifies it.

    Returns:
        The lease that others hold; None when the server is gone.

    Raises:
        ProcessesLeft: its processes survive.
        KeeperUnreachable: the keeper does not answer.
    """
    keeper = find_keeper(folder)
    if keeper is None:
        _end_what_is_left(folder)
        return None
    address, before = read_address(folder), keeper.status()
    lease = keeper.stop(owner=owner)
    others_wait = before is not None and any(one.owner != owner for one in before.waiting)
    if lease is None and not others_wait:  # for them it stays
        _wait_for_keeper(address)
    return lease


def _end_what_is_left(folder: Path) -> bool:
    """End the server of a keeper that was killed; False when there is none."""
    return read_lease(folder) is not None and bool(reap_left(folder))


def reap_left(folder: Path) -> list[str]:
    """End what a keeper that is gone left in its folder, and say what was found and done.

    Raises:
        KeeperUnreachable: a keeper is there after all.
        LeaseElsewhere, ProcessesLeft: as ``aerie.serving.reaping.reap`` raises.
    """
    if not folder.exists():
        return []
    with locked(folder, wait_seconds=KILLED_SECONDS) as mine:
        if not mine:
            raise KeeperUnreachable(f"{folder}: a keeper is just starting or ending there: try again")
        return reap(folder, grace_seconds=GRACE_SECONDS)


def _wait_for_keeper(address: KeeperAddress | None) -> None:
    if address is not None and address.is_of_this_host:
        wait_until_gone(address.keeper, KEEPER_END_SECONDS)


def evidence(folder: Path, launch_token: str) -> Evidence:
    """What the keeper of a folder can tell of a launch: its last log lines, its stacks, its last probe.

    Raises:
        LeaseLost: there is no keeper any more, or another server.
        KeeperUnreachable: the keeper does not answer.
    """
    keeper = find_keeper(folder)
    if keeper is None:
        raise LeaseLost(f"{address_path(folder)}: the keeper of {launch_token} is gone, and its server with it")
    return keeper.evidence(launch_token)


def require_unused(folder: Path, *, by: str) -> None:
    """Refuse to take the GPUs of a server that others hold.

    Raises:
        ServerBusy: an owner other than ``by`` holds the folder's server; the message says who, and until when.
    """
    lease = status(folder)
    if lease is not None and lease.state != "failed" and any(one.owner != by for one in lease.holders):
        raise ServerBusy(f"{lease.plan.phase} server {lease.url} has the GPUs, and is held by {lease.held_by}")


def status(folder: Path) -> Lease | None:
    """The lease as the keeper has it; without a keeper, as it was left on disk (its keeper was killed), or None."""
    keeper = find_keeper(folder)
    return keeper.status() if keeper is not None else read_lease(folder)
