import time

import pytest
import requests

from aerie import delivery
from aerie.ports import free_port
from tests.receivers import SECRET, receiving


def test_every_receiver_gets_the_message_whatever_becomes_of_the_others():
    with receiving() as receiver:
        urls = [
            receiver.url("refuse"),
            f"json://127.0.0.1:{free_port()}/{SECRET}",
            "no-such-service://x",
            receiver.url("take"),
        ]
        outcomes = delivery.deliver(urls, title="title", body="first\n\nsecond")
    assert [(message["title"], message["message"]) for message in receiver.messages] == [("title", "first\n\nsecond")]
    errors = [outcome.error for outcome in outcomes]
    assert errors.count(None) == 1
    assert any("error=500" in error for error in errors if error)
    assert any("onnection error" in error for error in errors if error)
    assert any("no-such-service" in error for error in errors if error)
    assert SECRET not in str(outcomes)


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("slack://TokenA/TokenB/TokenC", {"TokenA", "TokenB", "TokenC"}),
        ("slack://bot@T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#general", {"T1JJ3T3L2", "A1BRTD4JD"}),
        ("tgram://123456789:abc/1", {"123456789:abc"}),
        ("discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", {"4174216298"}),
        ("pover://uuuuuser@ttttoken", {"uuuuuser", "ttttoken"}),
    ],
)
def test_a_token_in_the_place_of_a_host_is_a_secret(url, secrets):
    assert secrets <= delivery.private_parts(url)


@pytest.mark.parametrize(
    "url",
    [
        "json://user:password@receiver.example.org:8080/path?token=hush",
        "jsons://127.0.0.1/services/path",
        "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "https://receiver.example.org/path",
        "mailto://user:password@gmail.com",
        "gotify://gotify.example.org/path/token-of-gotify",
        "matrix://user:password@matrix.example.org/#general",
        "ntfys://ntfy.example.org/topic",
        "ntfy://topic-of-ours",
        "no-such-service://somewhere/path",
    ],
)
def test_the_host_and_the_room_of_a_receiver_stay_readable(url):
    said = "receiver.example.org 127.0.0.1 hooks.slack.com gmail.com gotify.example.org matrix.example.org general "
    said += "ntfy.example.org topic-of-ours topic somewhere path services"
    assert not [part for part in delivery.private_parts(url) if part in said]


def test_what_an_answer_quotes_of_a_token_is_masked(monkeypatch):
    answer = requests.Response()
    answer.status_code = 401
    answer._content = b'{"ok": false, "description": "there is no bot123456789:abcdef"}'
    monkeypatch.setattr("requests.post", lambda *_, **__: answer)
    (outcome,) = delivery.deliver(["tgram://123456789:abcdef/1"], title="t", body="b")
    assert "there is no bot***" in outcome.error, "Apprise no longer quotes what a receiver answers"


def test_a_receiver_that_hangs_is_given_up_and_named(monkeypatch):
    monkeypatch.setattr(delivery, "DELIVERY_SECONDS", 0.5)
    with receiving() as receiver:
        began = time.monotonic()
        outcomes = delivery.deliver([receiver.url("hang"), receiver.url("take")], title="t", body="b")
        assert time.monotonic() - began < 30
        assert len(receiver.messages) == 1
    assert sorted(outcome.error is None for outcome in outcomes) == [False, True]
