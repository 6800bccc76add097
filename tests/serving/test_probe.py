"""What the probe takes for a ready server, and what it does not."""

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from aerie.serving.errors import NotReady, WrongServer
from aerie.serving.launch import free_port
from aerie.serving.plan import DrafterPlan, ServerPlan
from aerie.serving.probe import differences_from_plan, probe

from . import fake_server
from .fake_keeper import fake_info

Answering = Callable[[str, ServerPlan], str]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts a server of a behaviour inside the test; gives its URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(behaviour: str, plan: ServerPlan) -> str:
        info = {**fake_info(plan), "served_model_name": "launch-1"}
        handler = type("Handler", (fake_server.Handler,), {"behaviour": behaviour, "info": info})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_healthy_server_is_ready(answering: Answering, make_plan: Callable[..., ServerPlan]) -> None:
    plan = make_plan()
    assert probe(answering("healthy", plan), plan, "launch-1").max_total_num_tokens == 4096


def test_nothing_there_is_not_ready(make_plan: Callable[..., ServerPlan]) -> None:
    with pytest.raises(NotReady, match="health_generate"):
        probe(f"http://127.0.0.1:{free_port('127.0.0.1')}", make_plan(), "launch-1")


def test_loading_server_is_not_ready(answering: Answering, make_plan: Callable[..., ServerPlan]) -> None:
    plan = make_plan()
    with pytest.raises(NotReady, match="503"):
        probe(answering("never ready", plan), plan, "launch-1")


def test_another_server_on_the_port_is_not_ours(answering: Answering, make_plan: Callable[..., ServerPlan]) -> None:
    plan = make_plan()
    with pytest.raises(WrongServer, match="served_model_name is 'launch-1', expected 'launch-2'"):
        probe(answering("healthy", plan), plan, "launch-2")


def test_one_token_whatever_the_prompt_is_a_broken_model(
    answering: Answering, make_plan: Callable[..., ServerPlan]
) -> None:
    plan = make_plan()
    with pytest.raises(WrongServer, match="answers token 7 64 times over"):
        probe(answering("constant answer", plan), plan, "launch-1")


def test_missing_output_ids_are_an_error_and_never_zero(
    answering: Answering, make_plan: Callable[..., ServerPlan]
) -> None:
    plan = make_plan()
    with pytest.raises(WrongServer, match="got 31 and 32"):
        probe(answering("short answer", plan), plan, "launch-1")


def test_every_difference_from_the_plan_is_named(make_plan: Callable[..., ServerPlan]) -> None:
    plan = make_plan(phase="benchmark", drafter=DrafterPlan(path=Path("/d"), identity="1"), tensor_parallel_size=8)
    info = {**fake_info(plan), "served_model_name": "launch-1"}
    assert differences_from_plan(info, plan, "launch-1") == []
    changes = {
        "model_path": "/other", "dtype": "float16", "kv_cache_dtype": "fp8_e5m2", "tp_size": 4, "context_length": 1,
        "reasoning_parser": "kimi_k2", "tool_call_parser": "kimi_k2", "speculative_algorithm": "EAGLE",
    }  # fmt: skip
    for field, value in changes.items():
        (difference,) = differences_from_plan({**info, field: value}, plan, "launch-1")
        assert difference.startswith(f"{field} is {value!r}, expected")
    missing = {
        field: value for field, value in info.items() if field not in ("reasoning_parser", "max_total_num_tokens")
    }
    assert differences_from_plan(missing, plan, "launch-1") == [
        "reasoning_parser is 'missing', expected None",
        "max_total_num_tokens is missing",
    ]
