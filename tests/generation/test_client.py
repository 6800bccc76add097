"""What can go wrong with one request is told apart, and a reply is never read with a default."""

import asyncio
import gzip
import json
import time
from functools import partial

import pytest
from aiohttp import web

from aerie.generation import client as client_module
from aerie.generation.client import GenerateClient, GenerateRequest, RequestFailed, ServerGone, parse_reply
from aerie.generation.stage import ALIVE_SECONDS

from .fake_server import FakeServer, answer_ids, reply
from .proxy import Proxy

RID = "main/B1:run:s1:3"
good = partial(reply, id=RID)
GOOD = good([1, 2, 900], 5)


def parse(body: bytes):
    return parse_reply(body, rid=RID, prompt_tokens=5)


def without(*path: str) -> dict:
    document = json.loads(json.dumps(GOOD))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return document


@pytest.mark.parametrize(
    "path",
    [
        ("output_ids",),
        ("meta_info",),
        ("meta_info", "id"),
        ("meta_info", "completion_tokens"),
        ("meta_info", "prompt_tokens"),
        ("meta_info", "finish_reason"),
        ("meta_info", "finish_reason", "type"),
    ],
)
def test_a_missing_field_is_an_error_that_names_it_and_shows_the_keys_received(path):
    with pytest.raises(RequestFailed) as caught:
        parse(json.dumps(without(*path)).encode())
    assert caught.value.kind == "schema" and not caught.value.transient
    assert f"field {'.'.join(path)}: field required; keys received: text" in str(caught.value)


def test_a_count_that_moved_to_usage_is_not_read_as_zero():
    moved = {**without("meta_info", "completion_tokens"), "usage": {"completion_tokens": 3}}
    with pytest.raises(
        RequestFailed, match=r"meta_info\.completion_tokens: .*keys received: .*usage; in meta_info: id,"
    ):
        parse(json.dumps(moved).encode())


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (good([1], 5, completion_tokens="1"), "schema"),
        (good([1], 5, completion_tokens=None), "schema"),
        (good([1], 5, completion_tokens=True), "schema"),
        (good([1], 5, completion_tokens=1.0), "schema"),
        (good([1], 5, completion_tokens=-1), "schema"),
        (good([1], 5, completion_tokens=2**31), "schema"),
        (good([1], 5, completion_tokens=float("nan")), "schema"),
        (good([1], 5, finish_reason="stop"), "schema"),
        (good([1], 5, finish_reason={"type": "eos"}), "schema"),
        ({**GOOD, "output_ids": ["1"]}, "schema"),
        ({**GOOD, "output_ids": [1.0]}, "schema"),
        ({**GOOD, "output_ids": [True]}, "schema"),
        ({**GOOD, "output_ids": [float("nan")]}, "schema"),
        ({**GOOD, "output_ids": [[1, 2]]}, "schema"),
        ({**GOOD, "output_ids": None}, "schema"),
        ([GOOD], "schema"),
        (None, "schema"),
        (good([1, 2, 900], 4), "inconsistent"),
        (good([1, 2, 900], 5, id="main/B1:run:s2:1"), "inconsistent"),
        (good([1], 5, finish_reason={"type": "abort", "message": "input too long", "status_code": 400}), "poisoned"),
        (good([1], 5, finish_reason={"type": "abort", "message": "restarting", "status_code": 503}), "aborted"),
        (good([1], 5, finish_reason={"type": "abort", "message": None}), "aborted"),
    ],
)
def test_replies_that_are_wrong_are_told_apart(document, kind):
    with pytest.raises(RequestFailed) as caught:
        parse(json.dumps(document).encode())
    assert caught.value.kind == kind


TEXT = json.dumps(GOOD)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>bad gateway</html>", b'{"output_ids": [1,', b"\xff", TEXT.encode()[:-1], TEXT.encode() * 2,
        b"\xef\xbb\xbf" + TEXT.encode(), TEXT.encode("utf-16"), gzip.compress(TEXT.encode()),
        TEXT.replace('"text": ""', '"text": "\xe9"').encode("latin-1"),
        TEXT.replace('"text": ""', '"text": "\\ud800"').encode(),
        TEXT.replace("[1, 2", "[" + "9" * 5000).encode(), b"[" * 100_000,
    ],
    ids=range(13),
)  # fmt: skip
def test_a_body_that_is_not_json_is_worth_sending_again(body):
    with pytest.raises(RequestFailed) as caught:
        parse(body)
    assert caught.value.kind == "malformed_json" and caught.value.transient


def test_what_a_server_says_never_breaks_the_ledger_that_keeps_it():
    strange = {"a\0b": 1, "x" * 100_000: 2, "c\nd": 3}
    with pytest.raises(RequestFailed) as caught:
        parse(json.dumps(strange).encode())
    message = str(caught.value)
    assert "keys received: a\N{REPLACEMENT CHARACTER}b" in message and len(message) < 1100 and "\n" not in message
    message.encode()


def open_client(server: FakeServer | Proxy, *, timeout: float = 30.0, attempts: int = 3):
    return GenerateClient.open(
        server.url, concurrency=2, sampling={}, request_timeout_seconds=timeout, maximum_attempts=attempts,
        first_backoff_seconds=0.01,
    )  # fmt: skip


def ask(server: FakeServer | Proxy, *, timeout: float = 30.0, attempts: int = 3):
    async def run():
        async with open_client(server, timeout=timeout, attempts=attempts) as client:
            request = GenerateRequest(rid="main/B1:run:s1", input_ids=[1, 2], max_new_tokens=8, first_attempt=3)
            return await client.generate(request)

    return asyncio.run(run())


def test_an_answer_carries_its_attempt_counted_on_from_earlier_runs():
    with FakeServer("", fault=lambda body, before: web.Response(status=503) if before == 0 else None) as server:
        answer = ask(server)
    assert (answer.attempt, answer.reply.output_ids) == (4, answer_ids("s1"))
    assert [body["rid"] for body in server.requests] == ["main/B1:run:s1:3", "main/B1:run:s1:4"]


@pytest.mark.parametrize(
    ("status", "kind", "sent"),
    [
        (400, "poisoned", 1),
        (422, "poisoned", 1),
        (429, "server_error", 3),
        (408, "server_error", 3),
        (500, "server_error", 3),
    ],
)
def test_a_request_that_is_refused_is_sent_once_and_a_server_that_cannot_is_asked_again(status, kind, sent):
    with (
        FakeServer("", fault=lambda body, before: web.Response(status=status, text="why")) as server,
        pytest.raises(RequestFailed, match=f"HTTP {status}: why") as caught,
    ):
        ask(server)
    assert (caught.value.kind, caught.value.attempts, len(server.requests)) == (kind, sent, sent)


def test_a_request_that_takes_too_long_is_a_timeout_not_a_dead_server():
    with (
        FakeServer("", delay_seconds=30.0) as server,
        pytest.raises(RequestFailed, match="no answer within") as caught,
    ):
        ask(server, timeout=0.3, attempts=1)
    assert caught.value.kind == "timeout"


def test_a_connection_that_is_reset_by_a_living_server_is_sent_again():
    with FakeServer("", fault=lambda body, before: ConnectionResetError() if before == 0 else None) as server:
        assert ask(server).attempt == 4


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (web.Response(text="<html>login</html>", content_type="text/html"), "malformed_json"),
        (web.Response(status=302, headers={"Location": "/health"}), "server_error"),
        (web.Response(status=204), "server_error"),
        (web.Response(body=b"not gzip", headers={"Content-Encoding": "gzip"}), "connection"),
        (web.Response(body=TEXT.encode(), headers={"Content-Encoding": "zstd"}), "connection"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_of_something_that_is_no_sglang_are_transient_failures(answer, kind):
    with FakeServer("", fault=lambda body, before: answer) as server, pytest.raises(RequestFailed) as caught:
        ask(server, attempts=1)
    assert caught.value.kind == kind and caught.value.transient


def test_a_compressed_answer_is_read():
    def zipped(body, before):
        text = json.dumps(reply([1, 900], 2, id=body["rid"]))
        return web.Response(body=gzip.compress(text.encode()), headers={"Content-Encoding": "gzip"})

    with FakeServer("", fault=zipped) as server:
        assert ask(server).reply.output_ids == [1, 900]


def test_a_server_that_refuses_connections_is_gone_not_a_failed_sample(monkeypatch):
    monkeypatch.setattr(client_module, "GONE_AFTER_SECONDS", 1.0)
    with FakeServer("") as server:
        pass
    with pytest.raises(ServerGone, match="is gone"):
        ask(server)


def test_a_server_that_accepts_connections_and_answers_nothing_is_gone_within_ten_seconds():
    """As a process that is stopped: the kernel goes on to accept for it. The longest wait is between two looks."""
    with FakeServer("") as server, Proxy(server.port) as proxy:
        proxy.swallow = True
        started = time.monotonic()
        with pytest.raises(ServerGone, match="it answers nothing within"):
            ask(proxy, timeout=0.5)
        assert time.monotonic() - started + ALIVE_SECONDS < 10


def test_a_busy_scheduler_behind_a_living_http_process_is_not_gone(monkeypatch):
    monkeypatch.setattr(client_module, "HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(client_module, "GONE_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(client_module, "PROBE_INTERVAL_SECONDS", 0.1)
    with FakeServer("", health_seconds=[0.6, 0.6, 0.0]) as server:
        asyncio.run(look(server))
    monkeypatch.setattr(client_module, "SILENT_AFTER_SECONDS", 0.5)
    with FakeServer("", health_seconds=[9.0] * 9) as server, pytest.raises(ServerGone, match="/health does not answer"):
        asyncio.run(look(server))


def test_a_probe_that_is_late_does_not_end_a_run_whose_answers_come(monkeypatch):
    """The client may be the slow one: its own probe waits behind hundreds of answers."""
    monkeypatch.setattr(client_module, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(client_module, "GONE_AFTER_SECONDS", 0.0)

    async def run(server: FakeServer):
        async with open_client(server) as client:
            request = GenerateRequest(rid="main/B1:run:s1", input_ids=[1, 2], max_new_tokens=8)
            _, answer = await asyncio.gather(client.confirm_alive(), client.generate(request))
            return answer

    with FakeServer("", delay_seconds=0.1, info_seconds=1.0) as server:
        assert asyncio.run(run(server)).attempt == 1


async def look(server: FakeServer) -> None:
    async with open_client(server) as client:
        await client.confirm_alive()
