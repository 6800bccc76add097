import time

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


def test_a_receiver_that_hangs_is_given_up_and_named(monkeypatch):
    monkeypatch.setattr(delivery, "DELIVERY_SECONDS", 0.5)
    with receiving() as receiver:
        began = time.monotonic()
        outcomes = delivery.deliver([receiver.url("hang"), receiver.url("take")], title="t", body="b")
        assert time.monotonic() - began < 30
        assert len(receiver.messages) == 1
    assert sorted(outcome.error is None for outcome in outcomes) == [False, True]
