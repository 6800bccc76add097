"""What the probe takes for a ready server, and what it does not."""

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from aerie.errors import BadInput
from aerie.ports import free_port
from aerie.serving.errors import NotReady, WrongServer
from aerie.serving.passage import PassageScore, first_launches_path
from aerie.serving.plan import DrafterPlan, ServerPlan
from aerie.serving.probe import ReadyServer, differences_from_plan, probe
from aerie.serving.probing import Probing
from aerie.serving.question import Answer
from aerie.settings.profile import load_profile

from . import fake_server
from .fake_keeper import fake_info

Answering = Callable[[str, ServerPlan], str]
Probe = Callable[..., ReadyServer]


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


@pytest.fixture
def probed(answering: Answering, make_plan: Callable[..., ServerPlan], probing: Probing, tmp_path: Path) -> Probe:
    """Probes a server of a behaviour with the question and the passage."""

    def run(behaviour: str = "healthy", **changes: Any) -> ReadyServer:
        plan = make_plan(probing=probing, **changes)
        return probe(answering(behaviour, plan), plan, "launch-1", folder=tmp_path)

    return run


def test_healthy_server_is_ready(answering: Answering, make_plan: Callable[..., ServerPlan], tmp_path: Path) -> None:
    plan = make_plan()
    assert probe(answering("healthy", plan), plan, "launch-1", folder=tmp_path).max_total_num_tokens == 4096


def test_answer_and_score_of_a_healthy_server_are_told(probed: Probe) -> None:
    (replica,) = probed().replicas
    assert replica.answer == Answer(tokens=33, finish="stop", flags=(), tries=1)
    assert replica.score == PassageScore(computed=-2.5, second_half=-2.5, second_half_cached=-2.5, cached_tokens=25)


def test_every_replica_is_asked_by_its_rank(
    answering: Answering, make_plan: Callable[..., ServerPlan], probing: Probing, tmp_path: Path
) -> None:
    plan = make_plan(probing=probing, data_parallel_size=3)
    bodies: list[dict[str, Any]] = []
    with patch.object(fake_server.Handler, "bodies", bodies):
        ready = probe(answering("healthy", plan), plan, "launch-1", folder=tmp_path)
    assert [replica.replica for replica in ready.replicas] == [0, 1, 2]
    for kind in ("ignore_eos", "stop_token_ids"):
        asked = [body["routed_dp_rank"] for body in bodies if kind in body["sampling_params"]]
        assert set(asked) == {0, 1, 2}
    assert [body["routed_dp_rank"] for body in bodies if body.get("return_logprob")] == [0, 0, 1, 1, 2, 2]


def test_answers_of_another_launch_are_refused(probed: Probe) -> None:
    with pytest.raises(WrongServer, match=r"the answer is of launch 'launch-0' .* expected 'launch-1'"):
        probed("another launch")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("loops", r"3 answers to a question .* loop in 121 tokens \[7, 8, 9"),
        ("loops to the cap", "loop in 1024 tokens"),
        ("never closes its reasoning", "no_close, empty_answer in 32 tokens"),
    ],
)
def test_three_answers_that_are_no_answers_are_a_broken_model(probed: Probe, behaviour: str, reason: str) -> None:
    with pytest.raises(WrongServer, match=reason):
        probed(behaviour)


def test_one_odd_answer_is_chance(probed: Probe) -> None:
    (replica,) = probed("odd at first").replicas
    assert replica.answer is not None
    assert replica.answer.tries == 2


def test_reasoning_that_goes_on_to_the_cap_is_no_fault(probed: Probe) -> None:
    (replica,) = probed("reasons to the cap").replicas
    assert replica.answer == Answer(tokens=1024, finish="length", flags=("truncated_in_reasoning",), tries=1)


def test_a_family_that_does_not_reason_needs_no_boundary(
    answering: Answering, make_plan: Callable[..., ServerPlan], probing: Probing, tmp_path: Path
) -> None:
    plain = probing.model_copy(
        update={
            "profile": load_profile("smollm2"),
            "texts": probing.texts.model_copy(update={"question_ids": (1, 2, 3)}),
        }
    )
    plan = make_plan(probing=plain)
    (replica,) = probe(answering("never closes its reasoning", plan), plan, "launch-1", folder=tmp_path).replicas
    assert replica.answer == Answer(tokens=32, finish="stop", flags=(), tries=1)
    with pytest.raises(WrongServer, match="loop in 121 tokens"):
        probe(answering("loops", plan), plan, "launch-1", folder=tmp_path)


def test_a_question_that_leaves_no_room_for_an_answer_names_the_setting(probed: Probe) -> None:
    with pytest.raises(WrongServer, match="does not fit into 4: raise context_length"):
        probed(context_length=20)


def test_the_first_launch_is_what_later_ones_are_held_against(probed: Probe, tmp_path: Path) -> None:
    probed()
    assert probed().replicas[0].score is not None
    with pytest.raises(WrongServer) as failure:
        probed("less likely")
    message = str(failure.value)
    assert "-2.6000 nats (SGLang None" in message
    assert "had -2.5000 nats at this model's first launch" in message
    assert "at most 0.02 (serving.logprob_tolerance_nats)" in message
    assert "quantised KV cache" in message
    probed("less likely", model_identity="another model")
    probed("less likely", dtype="float16")
    first_launches_path(tmp_path).unlink()
    probed("less likely")


def test_the_dtype_of_the_kv_cache_is_no_excuse_for_another_score(probed: Probe) -> None:
    probed()
    with pytest.raises(WrongServer, match=r"KV cache fp8_e4m3.*KV auto"):
        probed("less likely", kv_cache_dtype="fp8_e4m3", allow_quantised_kv="to be measured")


def test_a_cache_that_changes_the_score_shows_at_the_first_launch(probed: Probe) -> None:
    with pytest.raises(WrongServer, match=r"-2\.6000 nats with its beginning read from the KV cache .* -2\.5000 nats"):
        probed("corrupted cache")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("no logprobs", "meta_info.input_token_logprobs: Field required"),
        ("not a number", "1 of 49 log-probabilities of a passage are no numbers"),
    ],
)
def test_missing_logprobs_are_an_error_and_never_zero(probed: Probe, behaviour: str, reason: str) -> None:
    with pytest.raises(WrongServer, match=reason):
        probed(behaviour)


def test_a_damaged_file_of_first_launches_is_named(probed: Probe, tmp_path: Path) -> None:
    first_launches_path(tmp_path).write_text("{")
    with pytest.raises(BadInput, match=r"first_launches\.json: not the first launches"):
        probed()


def test_nothing_there_is_not_ready(make_plan: Callable[..., ServerPlan], tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="health_generate"):
        probe(f"http://127.0.0.1:{free_port()}", make_plan(), "launch-1", folder=tmp_path)


def test_loading_server_is_not_ready(
    answering: Answering, make_plan: Callable[..., ServerPlan], tmp_path: Path
) -> None:
    plan = make_plan()
    with pytest.raises(NotReady, match="503"):
        probe(answering("never ready", plan), plan, "launch-1", folder=tmp_path)


def test_another_server_on_the_port_is_not_ours(
    answering: Answering, make_plan: Callable[..., ServerPlan], tmp_path: Path
) -> None:
    plan = make_plan()
    with pytest.raises(WrongServer, match="served_model_name is 'launch-1', expected 'launch-2'"):
        probe(answering("healthy", plan), plan, "launch-2", folder=tmp_path)


def test_one_token_whatever_the_prompt_is_a_broken_model(
    answering: Answering, make_plan: Callable[..., ServerPlan], tmp_path: Path
) -> None:
    plan = make_plan()
    with pytest.raises(WrongServer, match="answers token 7 64 times over"):
        probe(answering("constant answer", plan), plan, "launch-1", folder=tmp_path)


def test_missing_output_ids_are_an_error_and_never_zero(
    answering: Answering, make_plan: Callable[..., ServerPlan], tmp_path: Path
) -> None:
    plan = make_plan()
    with pytest.raises(WrongServer, match="got 31 and 32"):
        probe(answering("short answer", plan), plan, "launch-1", folder=tmp_path)


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
