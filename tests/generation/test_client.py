"""What can go wrong with one request is told apart, and a reply is never read with a default."""

import asyncio
import json

import pytest
from aiohttp import web

from aerie.generation import client as client_module
from aerie.generation.client import GenerateClient, GenerateRequest, RequestFailed, ServerGone, parse_reply

from .fake_server import FakeServer, answer_ids, reply

GOOD = reply([1, 2, 900], 5)


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
        ("meta_info", "completion_tokens"),
        ("meta_info", "prompt_tokens"),
        ("meta_info", "finish_reason"),
        ("meta_info", "finish_reason", "type"),
    ],
)
def test_a_missing_field_is_an_error_that_names_it_and_shows_the_keys_received(path):
    with pytest.raises(RequestFailed) as caught:
        parse_reply(json.dumps(without(*path)).encode(), prompt_tokens=5)
    assert caught.value.kind == "schema" and not caught.value.transient
    assert f"field {'.'.join(path)}: field required; keys received: text" in str(caught.value)


def test_a_count_that_moved_to_usage_is_not_read_as_zero():
    moved = {**without("meta_info", "completion_tokens"), "usage": {"completion_tokens": 3}}
    with pytest.raises(
        RequestFailed, match=r"meta_info\.completion_tokens: .*keys received: .*usage; in meta_info: id,"
    ):
        parse_reply(json.dumps(moved).encode(), prompt_tokens=5)


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (reply([1], 5, completion_tokens="1"), "schema"),
        (reply([1], 5, completion_tokens=None), "schema"),
        ({**GOOD, "output_ids": ["1"]}, "schema"),
        ({**GOOD, "output_ids": None}, "schema"),
        ([GOOD], "schema"),
        (reply([1], 5, finish_reason={"type": "eos"}), "schema"),
        (reply([1, 2, 900], 4), "inconsistent"),
        (reply([1], 5, finish_reason={"type": "abort", "message": "input too long", "status_code": 400}), "poisoned"),
        (reply([1], 5, finish_reason={"type": "abort", "message": "restarting", "status_code": 503}), "aborted"),
        (reply([1], 5, finish_reason={"type": "abort", "message": None}), "aborted"),
    ],
)
def test_replies_that_are_wrong_are_told_apart(document, kind):
    with pytest.raises(RequestFailed) as caught:
        parse_reply(json.dumps(document).encode(), prompt_tokens=5)
    assert caught.value.kind == kind


@pytest.mark.parametrize("body", [b"", b"<html>bad gateway</html>", b'{"output_ids": [1,', b"\xff"])
def test_a_body_that_is_not_json_is_worth_sending_again(body):
    with pytest.raises(RequestFailed) as caught:
        parse_reply(body, prompt_tokens=5)
    assert caught.value.kind == "malformed_json" and caught.value.transient


def ask(server: FakeServer, *, timeout: float = 30.0, attempts: int = 3):
    async def run():
        options = {
            "sampling": {}, "request_timeout_seconds": timeout, "maximum_attempts": attempts,
            "first_backoff_seconds": 0.01,
        }  # fmt: skip
        async with GenerateClient.open(server.url, concurrency=2, **options) as client:
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


def test_a_server_that_refuses_connections_is_gone_not_a_failed_sample(monkeypatch):
    monkeypatch.setattr(client_module, "GONE_AFTER_SECONDS", 1.0)
    with FakeServer("") as server:
        pass
    with pytest.raises(ServerGone, match="is gone"):
        ask(server)
