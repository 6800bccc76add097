"""The keeper: parents one server, answers for it, and ends it when nobody renews its lease.

``python -m aerie.serving.keeper --root FOLDER [--host HOST]``, in the serve environment, in a session of its own.
HTTP endpoints, all with ``Authorization: Bearer`` and the token in ``FOLDER/keeper.token``:

- ``POST /ensure`` ``{plan, owner, lease_seconds, start_timeout_seconds}``: have a server of this plan; returns at once.
- ``POST /renew`` ``{launch_token, lease_seconds}``: hold it for longer.
- ``POST /stop`` ``{launch_token}`` (null: whichever it is): end it, and the keeper.
- ``GET /status``.

All but stop answer with the lease (or null). Errors are ``{"error": class name, "message": ...}``.
"""

import argparse
import asyncio
import contextlib
import fcntl
import hmac
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

from aiohttp import web
from pydantic import ValidationError

from aerie.errors import AerieError, BadInput
from aerie.processes import ProcessIdentity
from aerie.serving.errors import KeeperEnding, LeaseElsewhere, LeaseLost
from aerie.serving.gpus import gpu_utilisation
from aerie.serving.launch import Launched, advertised, start_server, stop_server, wait_until_ready
from aerie.serving.lease import (
    LOCKED_EXIT_CODE,
    KeeperAddress,
    Lease,
    address_path,
    lease_path,
    lock_path,
    read_lease,
    token_path,
    write,
)
from aerie.serving.plan import ServerPlan
from aerie.settings.profile import Frozen

GRACE_SECONDS = 30.0
WATCH_SECONDS = 1.0
IDLE_SECONDS = 120.0
"""How long a keeper without a lease waits for the request that it was started for."""

STATUS_OF_ERROR = {BadInput: 400, LeaseLost: 409}

log = logging.getLogger("aerie.serving.keeper")


class EnsureRequest(Frozen):
    """Body of ``POST /ensure``."""

    plan: ServerPlan
    owner: str
    lease_seconds: float
    start_timeout_seconds: float


class RenewRequest(Frozen):
    """Body of ``POST /renew``."""

    launch_token: str
    lease_seconds: float


class StopRequest(Frozen):
    """Body of ``POST /stop``."""

    launch_token: str | None = None


class Keeper:
    """The one server of a folder and its lease."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._identity = ProcessIdentity.of(os.getpid())
        self._lease: Lease | None = None
        self._launched: Launched | None = None
        self._wanted: str | None = None  # token of the launch that is to be watched
        self._watch: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._deadline = time.monotonic() + IDLE_SECONDS
        self.over = asyncio.Event()
        """Set when there is nothing left to keep."""

    @property
    def lease(self) -> Lease | None:
        """The lease as it stands."""
        return self._lease

    async def end_leftovers(self) -> None:
        """End the server of an earlier keeper that was killed.

        Raises:
            LeaseElsewhere: the lease is of another host and has not expired.
            ProcessesLeft: its processes survive.
        """
        lease = read_lease(self._root)
        if lease is None:
            return
        if lease.is_of_this_host:
            log.warning("ending the server that keeper %d left behind: pid %d", lease.keeper.pid, lease.server.pid)
            await asyncio.to_thread(stop_server, lease.server, grace_seconds=GRACE_SECONDS)
        elif not lease.has_expired:
            raise LeaseElsewhere(
                f"{lease_path(self._root)}: held by host {lease.host} for {lease.expires_at - time.time():.0f} s more; "
                "stop it there, or wait"
            )
        lease_path(self._root).unlink()

    async def ensure(self, request: EnsureRequest) -> Lease:
        """Have a server of the plan: the one that is there, or a new one in its place.

        Raises:
            KeeperEnding: this keeper takes no more servers.
            LaunchFailed: the plan's port is taken.
            ProcessesLeft: the server that is to be replaced survives.
        """
        async with self._changing:
            if self.over.is_set():
                raise KeeperEnding(f"keeper {self._identity.pid} of {self._root} is ending: ask again in a moment")
            if self._lease is not None and self._serves(self._lease, request.plan):
                return self._hold(self._lease.model_copy(update={"owner": request.owner}), request.lease_seconds)
            await self._end_server()
            return self._start(request)

    def _serves(self, lease: Lease, plan: ServerPlan) -> bool:
        return lease.state != "failed" and lease.plan_fingerprint == plan.fingerprint()

    def _start(self, request: EnsureRequest) -> Lease:
        # In the thread of the event loop, which lives as long as the keeper: the server dies with the thread.
        launched = start_server(request.plan, python=Path(sys.executable), logs=self._root / "logs")
        log.info("started %s server %s, pid %d", request.plan.phase, launched.url, launched.identity.pid)
        now = time.time()
        lease = Lease(
            host=socket.gethostname(),
            keeper=self._identity,
            server=launched.identity,
            state="starting",
            url=launched.url,
            port=launched.port,
            launch_token=launched.token,
            plan_fingerprint=request.plan.fingerprint(),
            plan=request.plan,
            log_path=launched.log.path,
            owner=request.owner,
            started_at=now,
            renewed_at=now,
            expires_at=now,
        )
        self._launched, self._wanted, self._deadline = launched, launched.token, 0.0
        self._watch = asyncio.create_task(self._watch_over(launched, request))
        self._watch.add_done_callback(self._note_crash)
        return self._hold(lease, request.lease_seconds)

    def renew(self, request: RenewRequest) -> Lease:
        """Hold the server for longer.

        Raises:
            LeaseLost: there is no lease, or it is of another launch.
        """
        return self._hold(self._lease_of(request.launch_token), request.lease_seconds)

    async def stop(self, request: StopRequest) -> None:
        """End the server, and then the keeper.

        Raises:
            LeaseLost: another launch than the one named is there.
            ProcessesLeft: its processes survive; the keeper stays.
        """
        async with self._changing:
            if request.launch_token is not None:
                self._lease_of(request.launch_token)
            await self._end_server()
            self.over.set()

    def expire_now(self) -> None:
        """Let the lease be over."""
        self._deadline = 0.0

    async def expire(self) -> None:
        """Wait until nobody renews any more, then end server and keeper."""
        while not self.over.is_set():
            if time.monotonic() > self._deadline:
                await self._end_if_expired()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), WATCH_SECONDS)

    async def _end_if_expired(self) -> None:
        async with self._changing:
            if time.monotonic() > self._deadline:  # still: a new server may have been started while this waited
                log.warning("the lease is over: ending the server")
                await self._end_server()
                self.over.set()

    def _lease_of(self, launch_token: str) -> Lease:
        if self._lease is None:
            raise LeaseLost(f"{lease_path(self._root)}: there is no lease (asked for {launch_token})")
        if self._lease.launch_token != launch_token:
            raise LeaseLost(
                f"{lease_path(self._root)}: the lease is of {self._lease.launch_token}, owner {self._lease.owner}, "
                f"not of {launch_token}: that server was replaced"
            )
        return self._lease

    def _hold(self, lease: Lease, seconds: float) -> Lease:
        # Whoever holds it for longest decides: two data sets may share the server.
        self._deadline = max(self._deadline, time.monotonic() + seconds)
        now = time.time()
        expires_at = now + self._deadline - time.monotonic()
        self._lease = lease.model_copy(
            update={"renewed_at": now, "expires_at": expires_at, "gpu_utilisation": gpu_utilisation()}
        )
        write(self._lease, lease_path(self._root))
        return self._lease

    def _update(self, **changes: object) -> None:
        if self._lease is not None:
            self._lease = self._lease.model_copy(update=changes)
            write(self._lease, lease_path(self._root))

    async def _watch_over(self, launched: Launched, request: EnsureRequest) -> None:
        """Wait for readiness, then watch the server until it dies or is replaced; a failure is kept in the lease."""
        try:
            ready = await asyncio.to_thread(
                wait_until_ready,
                launched,
                request.plan,
                folder=self._root,
                timeout_seconds=request.start_timeout_seconds,
                wanted=lambda: self._wanted == launched.token,
            )
            self._update(state="ready", max_total_num_tokens=ready.max_total_num_tokens)
            log.info("ready after %.0f s", time.time() - (self._lease.started_at if self._lease else 0))
            while self._wanted == launched.token:
                launched.require_alive()
                await asyncio.sleep(WATCH_SECONDS)
        except AerieError as failure:
            if self._wanted == launched.token:
                log.error("%s: %s", type(failure).__name__, failure)
                await asyncio.to_thread(stop_server, launched.identity, grace_seconds=0)
                self._update(state="failed", error=f"{type(failure).__name__}: {failure}")

    def _note_crash(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (crash := watch.exception()) is not None:
            log.error("watching the server failed", exc_info=crash)
            self._update(state="failed", error=f"{type(crash).__name__}: {crash}")

    async def _end_server(self) -> None:
        self._wanted = None
        if self._launched is not None:
            log.info("ending server %s, pid %d", self._launched.url, self._launched.identity.pid)
            await asyncio.to_thread(stop_server, self._launched.identity, grace_seconds=GRACE_SECONDS)
            await asyncio.to_thread(self._launched.process.wait)
        if self._watch is not None:
            await asyncio.wait([self._watch])
        self._launched, self._watch, self._lease = None, None, None
        lease_path(self._root).unlink(missing_ok=True)


def application(keeper: Keeper, token: str) -> web.Application:
    """The keeper's HTTP endpoints."""

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {token}"):
            return web.json_response({"error": "Unauthorized", "message": "wrong or no bearer token"}, status=401)
        try:
            return await handler(request)
        except ValidationError as error:
            return _refusal(BadInput(f"{request.path}: {error}"))
        except AerieError as error:
            return _refusal(error)

    async def ensure(request: web.Request) -> web.Response:
        return _answer(await keeper.ensure(EnsureRequest.model_validate_json(await request.read())))

    async def renew(request: web.Request) -> web.Response:
        return _answer(keeper.renew(RenewRequest.model_validate_json(await request.read())))

    async def stop(request: web.Request) -> web.Response:
        await keeper.stop(StopRequest.model_validate_json(await request.read()))
        return _answer(None)

    async def status(_: web.Request) -> web.Response:
        return _answer(keeper.lease)

    app = web.Application(middlewares=[authenticate])
    app.add_routes(
        [
            web.post("/ensure", ensure),
            web.post("/renew", renew),
            web.post("/stop", stop),
            web.get("/status", status),
        ]
    )
    return app


def _answer(lease: Lease | None) -> web.Response:
    text = "null" if lease is None else lease.model_dump_json()
    return web.Response(text=text, content_type="application/json")


def _refusal(error: AerieError) -> web.Response:
    status = next((code for kind, code in STATUS_OF_ERROR.items() if isinstance(error, kind)), 500)
    return web.json_response({"error": type(error).__name__, "message": str(error)}, status=status)


async def keep(root: Path, host: str) -> None:
    """Answer until the lease is over."""
    keeper = Keeper(root)
    await keeper.end_leftovers()
    token = secrets.token_urlsafe(32)
    _write_secret(token_path(root), token)
    runner = web.AppRunner(application(keeper, token), shutdown_timeout=5, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    port = runner.addresses[0][1]
    address = KeeperAddress(
        host=socket.gethostname(),
        keeper=ProcessIdentity.of(os.getpid()),
        url=f"http://{advertised(host)}:{port}",
    )
    write(address, address_path(root))
    log.info("keeper of %s answers at %s", root, address.url)
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[None]] = set()
    loop.add_signal_handler(signal.SIGTERM, lambda: stopping.add(asyncio.create_task(keeper.stop(StopRequest()))))
    try:
        await keeper.expire()
    finally:
        address_path(root).unlink(missing_ok=True)
        await runner.cleanup()
        log.info("keeper of %s ends", root)


def _write_secret(path: Path, secret: str) -> None:
    """Write a file that only its user can ever read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    temporary.replace(path)


def _lock(root: Path) -> IO[str] | None:
    """The folder's lock, held until the returned file is closed; None when another keeper has it."""
    file = lock_path(root).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def main() -> None:
    """Run a keeper."""
    parser = argparse.ArgumentParser(prog="python -m aerie.serving.keeper", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the lease, the token and the logs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    root: Path = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    lock = _lock(root)
    if lock is None:
        log.info("%s: another keeper is there", root)
        sys.exit(LOCKED_EXIT_CODE)
    with lock:
        try:
            asyncio.run(keep(root, arguments.host))
        except AerieError as error:
            log.error("%s: %s", type(error).__name__, error)
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
