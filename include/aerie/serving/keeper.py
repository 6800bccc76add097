"""The keeper: parents one server, answers for it, and ends it when nobody holds it any more.

``python -m aerie.serving.keeper --root FOLDER [--host HOST] [--stay]``, in the serve environment, in a session of its
own. HTTP endpoints, all with ``Authorization: Bearer`` and the token in ``FOLDER/keeper.token``, which is the one that
the keeper was given (``aerie.serving.lease.given_token``), else one of its own:

- ``POST /ensure`` ``{plan, owner, lease_seconds, start_timeout_seconds, preflight}``: hold a server of this plan;
  returns at once. The server that is there is shared when it is of the same plan; for another plan the owner's hold
  of it ends, and it is replaced when nobody else holds it. Otherwise the answer is ``ServerBusy`` and the owner has a
  place in the queue, first come first served, for as long as it asks again every few seconds.
- ``POST /renew`` ``{launch_token, owner, lease_seconds}``: hold it for longer.
- ``POST /stop`` ``{owner, launch_token}``: end the owner's hold, and the server when nobody else holds it; without an
  owner end it whoever holds it. A launch token that is not null must be that of the server.
- ``GET /status``.
- ``GET /evidence?launch_token=``: what is known of a launch that is stuck (``aerie.serving.evidence``).

All but evidence answer with the lease as it stands then, null where there is no server. Errors are
``{"error": class name, "message": ...}``. A hold ends when it is released, or not renewed for ``lease_seconds``; the
last one to end ends the server with it, and the keeper too when nobody waits. With ``--stay`` a hold that merely runs
out leaves the keeper: those of other hosts could not start another one.
"""

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from aerie.artefacts.observations import append_observation
from aerie.errors import AerieError, BadInput, one_line
from aerie.processes import ProcessIdentity, boot_id
from aerie.serving.errors import KeeperEnding, LeaseLost, OutOfMemory, ProcessesLeft, ServerBusy
from aerie.serving.evidence import Evidence, gather
from aerie.serving.gpus import gpu_utilisation
from aerie.serving.holders import Holds, Queue
from aerie.serving.launch import Launched, advertised, start_server, wait_until_ready
from aerie.serving.lease import (
    LOCKED_EXIT_CODE,
    KeeperAddress,
    Lease,
    address_path,
    given_token,
    lease_path,
    locked,
    token_path,
    write,
)
from aerie.serving.plan import ServerPlan
from aerie.serving.prediction import Prediction, observe, others_watched, predict_launch
from aerie.serving.preflight import AS_MEASURED, PreflightOptions, preflight
from aerie.serving.probe import ReadyServer
from aerie.serving.reaping import reap
from aerie.serving.reductions import record, reduction_behind
from aerie.serving.stopping import GRACE_SECONDS, gpu_memory_in_use, require_released, stop_server
from aerie.settings.profile import Frozen

WATCH_SECONDS = 1.0
IDLE_SECONDS = 120.0
"""How long a keeper without a lease waits for the request that it was started for."""

STATUS_OF_ERROR = {BadInput: 400, LeaseLost: 409, ServerBusy: 409}

log = logging.getLogger("aerie.serving.keeper")


class EnsureRequest(Frozen):
    """Body of ``POST /ensure``."""

    plan: ServerPlan
    owner: str
    lease_seconds: float
    start_timeout_seconds: float
    preflight: PreflightOptions = AS_MEASURED


class RenewRequest(Frozen):
    """Body of ``POST /renew``."""

    launch_token: str
    owner: str
    lease_seconds: float


class StopRequest(Frozen):
    """Body of ``POST /stop``."""

    owner: str | None = None
    launch_token: str | None = None


class Keeper:
    """The one server of a folder and its lease."""

    def __init__(self, root: Path, *, stays: bool = False) -> None:
        self._root = root
        self._stays = stays
        self._identity = ProcessIdentity.of(os.getpid())
        self._lease: Lease | None = None
        self._launched: Launched | None = None
        self._found: tuple[str, ...] = ()  # before the start of what is launched
        self._wanted: str | None = None  # token of the launch that is to be watched
        self._watch: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._holds = Holds()
        self._queue = Queue()
        self._idle_since = time.monotonic()
        self._proven: ReadyServer | None = None
        self.over = asyncio.Event()
        """Set when there is nothing left to keep."""

    @property
    def lease(self) -> Lease | None:
        """The lease as it stands."""
        return None if self._lease is None else self._lease.model_copy(update=self._parties())

    async def ensure(self, request: EnsureRequest) -> Lease:
        """Hold a server of the plan: the one that is there, or a new one in its place.

        Raises:
            KeeperEnding: this keeper takes no more servers.
            ServerBusy: others hold the server for another plan, or asked before; the owner has a place in the queue.
            PlanRefused: the planner does not know the model's attention, or the host cannot spare the memory.
            BadInput, MachineNotReady: the server cannot be started here and now (``preflight``).
            ProcessesLeft: the server that is to be replaced survives.
        """
        with self._queue.asking(request.owner, request.plan.phase):
            async with self._changing:
                if self.over.is_set():
                    raise KeeperEnding(f"keeper {self._identity.pid} of {self._root} is ending: ask again in a moment")
                self._holds.expire()
                shared = self._lease is not None and self._serves(self._lease, request.plan)
                if not shared:
                    self._holds.release(request.owner)  # it wants another server than the one that it held
                self._require_turn(request.owner, shared=shared)
                self._queue.leave(request.owner)
                if shared:
                    self._hold(request.owner, request.lease_seconds)
                else:
                    await self._end_server()
                    found = await asyncio.to_thread(preflight, request.plan, request.preflight, folder=self._root)
                    prediction = await asyncio.to_thread(predict_launch, request.plan, self._root)
                    self._start(request, prediction, [*found, prediction.text])
                return self._expect_lease()

    def _require_turn(self, owner: str, *, shared: bool) -> None:
        """Raise ServerBusy unless the owner may have the server now; one that holds it already always may."""
        ahead = self._queue.ahead_of(owner)
        in_use = self._lease is not None and self._lease.state != "failed" and bool(self._holds)
        if owner in self._holds or not (ahead or (in_use and not shared)):
            return
        self._record()
        server = f"{self._lease.plan.phase} server {self._lease.url}" if self._lease else "no server yet"
        held_by = self.lease.held_by if self.lease else "nobody"
        raise ServerBusy(f"{server} is held by {held_by}; before {owner} in the queue: {', '.join(ahead) or 'nobody'}")

    def _serves(self, lease: Lease, plan: ServerPlan) -> bool:
        return lease.state != "failed" and lease.plan_fingerprint == plan.fingerprint()

    def _start(self, request: EnsureRequest, prediction: Prediction, found: Sequence[str]) -> None:
        gpu_memory_before = gpu_memory_in_use()
        # In the thread of the event loop, which lives as long as the keeper: the server dies with the thread.
        launched = start_server(request.plan, python=Path(sys.executable), folder=self._root)
        for line in found:
            log.info("%s", line)
        reduction = reduction_behind(self._root, request.plan)
        log.info("started %s server %s, pid %d", request.plan.phase, launched.url, launched.identity.pid)
        now = time.time()
        self._lease = Lease(
            host=socket.gethostname(),
            boot_id=boot_id(),
            keeper=self._identity,
            server=launched.identity,
            state="starting",
            url=launched.url,
            port=launched.port,
            launch_token=launched.token,
            plan_fingerprint=request.plan.fingerprint(),
            plan=request.plan,
            log_path=launched.log.path,
            holders=(),
            reduction=None if reduction is None else str(reduction),
            gpu_memory_before=gpu_memory_before,
            started_at=now,
            renewed_at=now,
            expires_at=now,
        )
        self._launched, self._found, self._wanted = launched, tuple(found), launched.token
        self._watch = asyncio.create_task(self._watch_over(launched, request, prediction))
        self._watch.add_done_callback(self._note_crash)
        self._hold(request.owner, request.lease_seconds)

    def renew(self, request: RenewRequest) -> Lease:
        """Hold the server for longer.

        Raises:
            LeaseLost: there is no lease, it is of another launch, or the owner holds it no more.
        """
        self._require_launch(request.launch_token)
        self._holds.expire()
        if request.owner not in self._holds:
            raise LeaseLost(
                f"{lease_path(self._root)}: {request.owner} holds the server {request.launch_token} no more: its hold "
                "was released, or not renewed in time"
            )
        self._hold(request.owner, request.lease_seconds)
        return self._expect_lease()

    async def stop(self, request: StopRequest) -> Lease | None:
        """End one owner's hold, or every one; the server ends with the last, and the keeper unless somebody waits.

        Raises:
            LeaseLost: another launch than the one named is there.
            ProcessesLeft: its processes survive; the keeper stays.
        """
        async with self._changing:
            if request.launch_token is not None:
                self._require_launch(request.launch_token)
            if request.owner is None:
                self._holds.clear()
            else:
                self._queue.leave(request.owner)
                self._holds.expire()
                self._holds.release(request.owner)
            if self._holds:
                self._record()
            else:
                await self._end_server()
                if request.owner is None or not self._queue:
                    self.over.set()
            return self.lease

    async def evidence(self, launch_token: str) -> Evidence:
        """What is known of a launch.

        Raises:
            LeaseLost: it is not the one that is there.
        """
        launched = self._launched
        if launched is None or launched.token != launch_token:
            raise LeaseLost(f"{lease_path(self._root)}: server {launch_token} was ended or replaced")
        return await asyncio.to_thread(gather, launched.identity, launched.log.path, self._proven)

    async def expire(self) -> None:
        """Wait until nobody holds the server any more, and nobody waits, then end server and keeper."""
        while not self.over.is_set():
            if expired := self._holds.expire():
                log.warning("not renewed in time: %s", ", ".join(expired))
                self._record()
            if not self._holds:
                await self._end_if_unheld()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), WATCH_SECONDS)

    async def _end_if_unheld(self) -> None:
        async with self._changing:
            if self._holds:  # a new server was started while this waited
                return
            if had_server := self._lease is not None:
                log.warning("nobody holds the server: ending it")
                await self._end_server()
            if (
                not self._stays
                and not self._queue
                and (had_server or time.monotonic() - self._idle_since > IDLE_SECONDS)
            ):
                self.over.set()

    def _require_launch(self, launch_token: str) -> None:
        if self._lease is None:
            raise LeaseLost(f"{lease_path(self._root)}: there is no lease (asked for {launch_token})")
        if self._lease.launch_token != launch_token:
            raise LeaseLost(
                f"{lease_path(self._root)}: the lease is of {self._lease.launch_token}, held by {self._lease.held_by}, "
                f"not of {launch_token}: that server was replaced"
            )

    def _hold(self, owner: str, seconds: float) -> None:
        self._holds.hold(owner, seconds)
        progress = (*self._found, *self._launched.log.progress) if self._launched else ()
        self._record(renewed_at=time.time(), gpu_utilisation=gpu_utilisation(), progress=progress)

    def _parties(self) -> dict[str, object]:
        """The fields of the lease about who holds it and who waits, as they are now."""
        holders = self._holds.listed()
        ends = [holder.expires_at for holder in holders] or [time.time()]
        return {"holders": holders, "waiting": self._queue.listed(), "expires_at": max(ends)}

    def _expect_lease(self) -> Lease:
        lease = self.lease
        if lease is None:
            raise LeaseLost(f"{lease_path(self._root)}: there is no lease")
        return lease

    def _record(self, **changes: object) -> None:
        """Write the lease down, changed, with who holds the server and who waits for it now."""
        if self._lease is not None:
            self._lease = self._lease.model_copy(update={**changes, **self._parties()})
            write(self._lease, lease_path(self._root))

    async def _watch_over(self, launched: Launched, request: EnsureRequest, prediction: Prediction) -> None:
        """Wait for readiness, then watch the server until it dies or is replaced; a failure is kept in the lease."""
        try:
            with others_watched(prediction, launched) as taken_by_others:
                ready = await asyncio.to_thread(
                    wait_until_ready,
                    launched,
                    request.plan,
                    folder=self._root,
                    timeout_seconds=request.start_timeout_seconds,
                    wanted=lambda: self._wanted == launched.token,
                )
            self._proven = ready
            launched.log.progress.extend(f"proven: {replica.told}" for replica in ready.replicas)
            observation = observe(prediction, ready, launched.token, taken_by_others_bytes=taken_by_others())
            append_observation(self._root, observation)
            self._record(state="ready", max_total_num_tokens=ready.max_total_num_tokens, observation=observation)
            log.info("ready after %.0f s", time.time() - (self._lease.started_at if self._lease else 0))
            while self._wanted == launched.token:
                launched.require_alive()
                await asyncio.sleep(WATCH_SECONDS)
        except AerieError as failure:
            if self._wanted == launched.token:
                log.error("%s: %s", type(failure).__name__, failure)
                message = f"{type(failure).__name__}: {failure}"
                try:
                    await asyncio.to_thread(self._stop, launched, 0.0)
                except ProcessesLeft as left:
                    message += f"; and when it was ended, {left}"
                if isinstance(failure, OutOfMemory):
                    record(self._root, request.plan, failure, launched.log)
                self._record(state="failed", error=message)

    def _note_crash(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (crash := watch.exception()) is not None:
            log.error("watching the server failed", exc_info=crash)
            self._record(state="failed", error=f"{type(crash).__name__}: {crash}")

    def _stop(self, launched: Launched, grace_seconds: float) -> None:
        stop_server(launched.identity, launched.token, grace_seconds=grace_seconds)
        launched.process.wait()
        if self._lease is not None:
            require_released(
                host=self._lease.plan.host, port=launched.port, gpu_memory_before=self._lease.gpu_memory_before
            )

    async def _end_server(self) -> None:
        self._holds.clear()
        self._wanted = None
        if self._launched is not None:
            log.info("ending server %s, pid %d", self._launched.url, self._launched.identity.pid)
            await asyncio.to_thread(self._stop, self._launched, GRACE_SECONDS)
        if self._watch is not None:
            await asyncio.wait([self._watch])
        self._launched, self._watch, self._lease, self._proven = None, None, None, None
        self._idle_since = time.monotonic()
        lease_path(self._root).unlink(missing_ok=True)


def application(keeper: Keeper, token: str) -> web.Application:
    """The keeper's HTTP endpoints."""

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not hmac.compare_digest(
            request.headers.get("Authorization", "").encode(errors="replace"), f"Bearer {token}".encode()
        ):
            return web.json_response({"error": "Unauthorized", "message": "wrong or no bearer token"}, status=401)
        try:
            return await handler(request)
        except ValidationError as error:
            return _refusal(BadInput(f"{request.path}: {one_line(error)}"))
        except AerieError as error:
            return _refusal(error)

    async def ensure(request: web.Request) -> web.Response:
        return _answer(await keeper.ensure(EnsureRequest.model_validate_json(await request.read())))

    async def renew(request: web.Request) -> web.Response:
        return _answer(keeper.renew(RenewRequest.model_validate_json(await request.read())))

    async def stop(request: web.Request) -> web.Response:
        return _answer(await keeper.stop(StopRequest.model_validate_json(await request.read())))

    async def status(_: web.Request) -> web.Response:
        return _answer(keeper.lease)

    async def evidence(request: web.Request) -> web.Response:
        return _answer(await keeper.evidence(request.query.get("launch_token", "")))

    app = web.Application(middlewares=[authenticate])
    app.add_routes(
        [
            web.post("/ensure", ensure),
            web.post("/renew", renew),
            web.post("/stop", stop),
            web.get("/status", status),
            web.get("/evidence", evidence),
        ]
    )
    return app


def _answer(answer: Frozen | None) -> web.Response:
    text = "null" if answer is None else answer.model_dump_json()
    return web.Response(text=text, content_type="application/json")


def _refusal(error: AerieError) -> web.Response:
    status = next((code for kind, code in STATUS_OF_ERROR.items() if isinstance(error, kind)), 500)
    return web.json_response({"error": type(error).__name__, "message": str(error)}, status=status)


async def keep(root: Path, host: str, *, stays: bool) -> None:
    """Answer until the lease is over; one that ``stays``, until it is told to end."""
    token = given_token() or secrets.token_urlsafe(32)
    for line in await asyncio.to_thread(reap, root, grace_seconds=GRACE_SECONDS):
        log.warning("%s", line)
    keeper = Keeper(root, stays=stays)
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
    stopping: set[asyncio.Task[Lease | None]] = set()
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


def main() -> None:
    """Run a keeper."""
    parser = argparse.ArgumentParser(prog="python -m aerie.serving.keeper", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the lease, the token and the logs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--stay", action="store_true", help="stay when a hold runs out: end only when told to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    root: Path = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    with locked(root) as mine:
        if not mine:
            log.info("%s: another keeper is there", root)
            sys.exit(LOCKED_EXIT_CODE)
        try:
            asyncio.run(keep(root, arguments.host, stays=arguments.stay))
        except AerieError as error:
            log.error("%s: %s", type(error).__name__, error)
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
