"""A server that lives and makes nothing: noticed by its tokens, restarted once, and then a failure with evidence."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.errors import Failed, Retryable
from aerie.generation import server as servers
from aerie.generation import stage
from aerie.generation.client import GenerateClient
from aerie.generation.server import Server, StuckServer
from aerie.generation.stalls import StallWatch
from aerie.serving.errors import LeaseLost
from aerie.serving.evidence import Evidence
from aerie.stages import Events, StageRequest

from .conftest import World, manifest_of
from .fake_server import FakeServer

EVIDENCE = Evidence(log_tail=("Decode batch, #running-req: 8",), processes=(), stacks=None, last_probe=None)


class Launches:
    """Stands in for the keeper: a server each time one is ensured, the next of a row; remembers which were ended."""

    def __init__(self, root: Path, row: list[FakeServer]) -> None:
        self._root = root
        self._row = row
        self._ensured = 0
        self.ended: list[str] = []

    def ensure(self, request: StageRequest, events: Events) -> Server:
        server = self._row[min(self._ensured, len(self._row) - 1)]
        self._ensured += 1
        token = f"launch-{self._ensured}"

        def end() -> StuckServer:
            self.ended.append(token)
            return StuckServer(EVIDENCE, self._root / "evidence" / f"{token}.json")

        return Server(server.url, token, lambda: None, end)


@pytest.fixture
def impatient(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose servers are stuck after a second."""
    serving = world.request().settings.serving.model_copy(update={"stall_seconds": 1})
    settings = world.request().settings.model_copy(update={"serving": serving})
    request = world.request().model_copy(update={"settings": settings})
    monkeypatch.setattr(World, "request", lambda self, **_: request)
    return world


def stuck_after(answers: int, server: FakeServer) -> Callable[[dict, int], None]:
    def fault(body, before):
        server.stuck = len(server.requests) >= answers

    return fault


def test_a_server_without_tokens_is_restarted_once_and_nothing_is_lost(impatient, monkeypatch):
    impatient.server.fault = stuck_after(12, impatient.server)
    with FakeServer(impatient.server.model_path) as second:
        launches = Launches(impatient.root, [impatient.server, second])
        monkeypatch.setattr(stage, "_ensure_server", launches.ensure)
        assert manifest_of(impatient.run()).counts["kept"] == 40
        assert launches.ended == ["launch-1"]
        assert 0 < len(second.requests) < 40, "what had arrived was asked for again"
    impatient.check_log_equals_ledger()
    (alert,) = [event for event in impatient.events("alert") if event["reason"] == "server_stuck"]
    assert "computed no token for 1 s with 8 requests in flight" in alert["message"]
    assert "Decode batch, #running-req: 8" in alert["message"]
    assert "launch-1.json; it is started again, once" in alert["message"]


def test_a_server_that_is_stuck_again_fails_with_the_evidence(impatient, monkeypatch):
    impatient.server.stuck = True
    launches = Launches(impatient.root, [impatient.server])
    monkeypatch.setattr(stage, "_ensure_server", launches.ensure)
    with pytest.raises(Failed, match=r"stuck again .* no token .*Decode batch.*launch-2\.json"):
        impatient.run()
    assert launches.ended == ["launch-1", "launch-2"]
    assert impatient.counts().pending == 40


def test_the_server_of_somebody_else_is_not_ended(impatient):
    impatient.server.stuck = True
    with pytest.raises(Retryable, match="computed no token"):
        impatient.run()
    assert impatient.counts().pending == 40


def test_a_stuck_server_that_another_run_has_ended_is_left_to_the_next_try(impatient, monkeypatch):
    def gone():
        raise LeaseLost("that server was replaced")

    impatient.server.stuck = True
    url = impatient.server.url
    monkeypatch.setattr(stage, "_ensure_server", lambda *_: Server(url, "launch-1", lambda: None, gone))
    with pytest.raises(Retryable, match="was replaced"):
        impatient.run()


def test_a_long_prefill_is_not_a_stall(impatient, monkeypatch):
    impatient.server.delay_seconds = 3.0
    done = threading.Event()

    def compute() -> None:
        while not done.wait(0.1):
            impatient.server.computed["prefill_compute"] += 512

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        launches = Launches(impatient.root, [impatient.server])
        monkeypatch.setattr(stage, "_ensure_server", launches.ensure)
        assert manifest_of(impatient.run()).counts["kept"] == 40
        assert launches.ended == []
    finally:
        done.set()
        thread.join()


def test_a_server_that_does_not_count_its_tokens_is_said_to_be_unwatched(impatient, monkeypatch):
    impatient.server.counts_tokens = False
    impatient.server.delay_seconds = 1.5
    launches = Launches(impatient.root, [impatient.server])
    monkeypatch.setattr(stage, "_ensure_server", launches.ensure)
    assert manifest_of(impatient.run()).counts["kept"] == 40
    (alert,) = [event for event in impatient.events("alert") if event["reason"] == "stall_unwatched"]
    assert "no sglang:realtime_tokens_total" in alert["message"]


def test_a_server_that_died_is_not_said_to_be_unwatched(impatient):
    async def look() -> None:
        async with GenerateClient.open(
            impatient.server.url, concurrency=1, sampling={}, request_timeout_seconds=5, maximum_attempts=1,
            first_backoff_seconds=0.1,
        ) as client:  # fmt: skip
            events = Events(impatient.root / "events.jsonl")
            await StallWatch(client, in_flight=lambda: 1, stall_seconds=1, events=events).look()

    impatient.server.die()
    asyncio.run(look())
    assert impatient.events("alert") == []


def test_a_server_that_answers_nothing_and_lives_is_restarted(impatient, monkeypatch):
    """As after SIGSTOP: the keeper sees a process, and whoever asks for a server next would get the same one."""
    monkeypatch.setattr(servers, "HEALTH_SECONDS", 0.2)
    impatient.server.fault = stuck_after(12, impatient.server)
    impatient.server.info_seconds = 20.0
    with FakeServer(impatient.server.model_path) as second:
        impatient.server.health_seconds = [20.0] * 20
        launches = Launches(impatient.root, [impatient.server, second])
        monkeypatch.setattr(stage, "_ensure_server", launches.ensure)
        assert manifest_of(impatient.run()).counts["kept"] == 40
        assert launches.ended == ["launch-1"]


def test_a_server_that_is_heard_of_again_is_not_ended(impatient):
    server = Server(impatient.server.url, "launch-1", lambda: None, None)
    assert not servers.stays_silent(server, 30)


def test_a_server_that_died_is_not_stuck(impatient):
    def died():
        raise LeaseLost("it died")

    impatient.server.health_seconds = [20.0]
    assert not servers.stays_silent(Server(impatient.server.url, "launch-1", died, None), 30)
