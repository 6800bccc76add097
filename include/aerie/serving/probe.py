"""Is it up, is it ours, does it answer? Health endpoints alone lie both ways, so real answers are asked for.

Every replica (data-parallel rank) is asked: for variety, for the answer to a known question, and for how likely a fixed
passage is.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from aerie.serving.errors import NotReady, WrongServer
from aerie.serving.passage import Launch, PassageScore, check_against_first_launch, score_passage
from aerie.serving.plan import ServerPlan
from aerie.serving.question import Answer, ask_question
from aerie.settings.profile import Frozen

HEALTH_TIMEOUT_SECONDS = 30.0  # SGLang's own check waits 20 s for its scheduler
ANSWER_TIMEOUT_SECONDS = 300.0
PROBE_TOKENS = 32
UNLIKELY_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
MARGIN_TOKENS = 16  # of the context, that SGLang keeps for itself
QUOTED_CHARACTERS = 300


class ReplicaProbe(Frozen):
    """What one replica answered; ``answer`` and ``score`` are None where the plan knows no question and no passage."""

    replica: int
    answer: Answer | None
    score: PassageScore | None

    @property
    def told(self) -> str:
        """What it proved, for people."""
        if self.answer is None or self.score is None:
            return f"replica {self.replica}: it answers, and not always the same"
        end = self.answer.finish + (f" at try {self.answer.tries}" if self.answer.tries > 1 else "")
        return (
            f"replica {self.replica}: a question answered in {self.answer.tokens} tokens ({end}); "
            f"a passage's mean log-probability {self.score.computed:.4f} nats, of its second half "
            f"{self.score.second_half:.4f}, and {self.score.second_half_cached:.4f} with {self.score.cached_tokens} "
            "tokens read from the cache"
        )


class ReadyServer(Frozen):
    """What a ready server says of itself. ``max_total_num_tokens`` is the size of its KV pool in tokens.

    ``memory_left_bytes`` is what the tightest rank had free at the end of its start, None where it does not say.
    """

    url: str
    max_total_num_tokens: int
    memory_left_bytes: int | None
    probed_at: float
    replicas: tuple[ReplicaProbe, ...]


def probe(url: str, plan: ServerPlan, launch_token: str, *, folder: Path) -> ReadyServer:
    """Check that the server at ``url`` is healthy, is the launch that is meant, and answers sensibly.

    Args:
        url: where it answers.
        plan: what it must be; with ``probing``, every replica answers a question and scores a passage.
        launch_token: the name that it was launched with.
        folder: the server's; scores of first launches are kept in it.

    Raises:
        NotReady: it does not answer (yet).
        WrongServer: it answers, but as another server, or nonsense.
    """
    _get(f"{url}/health_generate")
    info = server_info(url)
    differences = differences_from_plan(info, plan, launch_token)
    if differences:
        raise WrongServer(f"{url}/server_info: not the server that was launched: {'; '.join(differences)}")
    return probe_replicas(url, plan, info, version=launch_token, folder=folder)


def server_info(url: str) -> dict[str, Any]:
    """What a server says of itself at ``/server_info``.

    Raises:
        NotReady: it does not answer, or not with an object.
    """
    try:
        info = _get(f"{url}/server_info").json()
    except requests.JSONDecodeError as error:
        raise NotReady(f"{url}/server_info: not JSON: {error}") from error
    if not isinstance(info, dict):
        raise NotReady(f"{url}/server_info: expected an object, got {type(info).__name__}")
    return info


def probe_replicas(url: str, plan: ServerPlan, info: Mapping[str, Any], *, version: str, folder: Path) -> ReadyServer:
    """Probe every replica of a server that is as planned; each answer must be of weight version ``version``.

    Raises:
        NotReady, WrongServer: as ``probe``.
    """
    replicas = range(plan.data_parallel_size * plan.attention_data_parallel_size)
    return ReadyServer(
        url=url,
        max_total_num_tokens=int(info["max_total_num_tokens"]),
        memory_left_bytes=memory_left_bytes(info),
        probed_at=time.time(),
        replicas=tuple(
            _probe_replica(_Replica(url, replica, len(replicas), version), plan, folder, info) for replica in replicas
        ),
    )


@dataclass(frozen=True)
class _Replica:
    """One replica (data-parallel rank) of the server."""

    url: str
    rank: int
    replicas: int
    launch_token: str

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.url}/generate" + (f", replica {self.rank} of {self.replicas}" if self.replicas > 1 else "")

    def ask(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request to this replica; raises NotReady, or WrongServer where another process answers."""
        route = {"routed_dp_rank": self.rank} if self.replicas > 1 else {}
        reply = _post(f"{self.url}/generate", {**body, **route})
        version = reply.get("meta_info", {}).get("weight_version")
        if version != self.launch_token:
            raise WrongServer(
                f"{self.name}: the answer is of launch {version!r} (weight_version), expected {self.launch_token!r}: "
                "another server answers on this port"
            )
        return reply


def _probe_replica(replica: _Replica, plan: ServerPlan, folder: Path, info: Mapping[str, Any]) -> ReplicaProbe:
    _require_variety(replica)
    if plan.probing is None:
        return ReplicaProbe(replica=replica.rank, answer=None, score=None)
    room = min(plan.context_length, int(info["max_total_num_tokens"])) - MARGIN_TOKENS
    answer = ask_question(replica.ask, plan.probing, room=room, where=replica.name)
    passage = plan.probing.texts.passage_ids[:room]
    score = score_passage(replica.ask, passage, where=replica.name)
    launch = Launch(folder, sglang_version=str(info.get("version")), where=replica.name)
    check_against_first_launch(score, passage, plan, plan.probing.logprob_tolerance_nats, launch=launch)
    return ReplicaProbe(replica=replica.rank, answer=answer, score=score)


def _require_variety(replica: _Replica) -> None:
    """Two prompts that have nothing to do with each other must not get one token all over."""
    answers = [_forced_answer(replica, prompt) for prompt in (UNLIKELY_PROMPT, UNLIKELY_PROMPT[::-1])]
    if len(set(answers[0] + answers[1])) == 1:
        raise WrongServer(
            f"{replica.name}: answers token {answers[0][0]} {2 * PROBE_TOKENS} times over, whatever the prompt: the "
            "model is broken as served (check dtype, kv_cache_dtype and the attention backend)"
        )


def memory_left_bytes(info: Mapping[str, Any]) -> int | None:
    """What ``/server_info`` says was free on the tightest rank when the start was over; None where it says nothing."""
    states = [state.get("memory_usage", {}) for state in info.get("internal_states", [])]
    left_gib = [usage["startup_available"] for usage in states if "startup_available" in usage]
    return round(min(left_gib) * 2**30) if left_gib else None


def differences_from_plan(info: Mapping[str, Any], plan: ServerPlan, launch_token: str) -> list[str]:
    """What ``/server_info`` says that differs from the plan, one entry a field; empty when all is as planned."""
    expected = {
        "served_model_name": launch_token,
        "model_path": str(plan.model_path),
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "context_length": plan.context_length,
        "tp_size": plan.tensor_parallel_size,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "speculative_algorithm": "EAGLE3" if plan.drafter else None,
        "disable_radix_cache": plan.phase == "capture",
    }
    differences = [
        f"{field} is {info.get(field, 'missing')!r}, expected {value!r}"
        for field, value in expected.items()
        if field not in info or info[field] != value
    ]
    if not isinstance(info.get("max_total_num_tokens"), int):
        differences.append("max_total_num_tokens is missing")
    return differences


def _forced_answer(replica: _Replica, prompt: tuple[int, ...]) -> list[int]:
    """Token ids that the server generates for a prompt; their number must be the number that it counted."""
    sampling = {"temperature": 1.0, "max_new_tokens": PROBE_TOKENS, "ignore_eos": True}
    reply = replica.ask({"input_ids": list(prompt), "sampling_params": sampling})
    output, counted = reply.get("output_ids"), reply.get("meta_info", {}).get("completion_tokens")
    if not isinstance(output, list) or len(output) != PROBE_TOKENS or counted != PROBE_TOKENS:
        raise WrongServer(
            f"{replica.name}: expected {PROBE_TOKENS} output_ids and as many completion_tokens for a probe that "
            f"ignores the end token, got {len(output) if isinstance(output, list) else output!r} and {counted!r}"
        )
    return output


def _get(url: str) -> requests.Response:
    try:
        response = requests.get(url, timeout=HEALTH_TIMEOUT_SECONDS)
        response.raise_for_status()
    except requests.RequestException as error:
        raise NotReady(f"{url}: {error}") from error
    return response


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        response = requests.post(url, json=body, timeout=ANSWER_TIMEOUT_SECONDS)
        if response.status_code == requests.codes.bad_request:
            raise WrongServer(f"{url}: the server refuses the probe: {response.text[:QUOTED_CHARACTERS]}")
        response.raise_for_status()
        reply = response.json()
    except requests.RequestException as error:
        raise NotReady(f"{url}: {error}") from error
    if not isinstance(reply, dict):
        raise WrongServer(f"{url}: expected an object, got {type(reply).__name__}")
    return reply
