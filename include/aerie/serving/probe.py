"""Is it up, is it ours, does it answer? Health endpoints alone lie both ways, so a real answer is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import requests

from aerie.serving.errors import NotReady, WrongServer
from aerie.serving.plan import ServerPlan

HEALTH_TIMEOUT_SECONDS = 30.0  # SGLang's own check waits 20 s for its scheduler
ANSWER_TIMEOUT_SECONDS = 120.0
PROBE_TOKENS = 32


@dataclass(frozen=True)
class ReadyServer:
    """What a ready server says of itself. ``max_total_num_tokens`` is the size of its KV pool in tokens."""

    url: str
    max_total_num_tokens: int


def probe(url: str, plan: ServerPlan, launch_token: str) -> ReadyServer:
    """Check that the server at ``url`` is healthy, is the launch that is meant, and answers sensibly.

    Raises:
        NotReady: it does not answer (yet).
        WrongServer: it answers, but as another server, or nonsense.
    """
    _get(f"{url}/health_generate")
    info = _get(f"{url}/server_info").json()
    differences = differences_from_plan(info, plan, launch_token)
    if differences:
        raise WrongServer(f"{url}/server_info: not the server that was launched: {'; '.join(differences)}")
    forward, backward = plan.probe_token_ids, plan.probe_token_ids[::-1]
    answers = [_answer(url, prompt) for prompt in (forward, backward)]
    if len(set(answers[0] + answers[1])) == 1:
        raise WrongServer(
            f"{url}/generate: answers token {answers[0][0]} {2 * PROBE_TOKENS} times over, whatever the prompt: the "
            "model is broken as served (check dtype, kv_cache_dtype and the attention backend)"
        )
    return ReadyServer(url=url, max_total_num_tokens=int(info["max_total_num_tokens"]))


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


def _answer(url: str, prompt: tuple[int, ...]) -> list[int]:
    """Token ids that the server generates for a prompt; their number must be the number that it counted."""
    sampling = {"temperature": 1.0, "max_new_tokens": PROBE_TOKENS, "ignore_eos": True}
    request = {"input_ids": list(prompt), "sampling_params": sampling}
    try:
        response = requests.post(f"{url}/generate", json=request, timeout=ANSWER_TIMEOUT_SECONDS)
        response.raise_for_status()
        reply = response.json()
    except requests.RequestException as error:
        raise NotReady(f"{url}/generate: {error}") from error
    output, counted = reply.get("output_ids"), reply.get("meta_info", {}).get("completion_tokens")
    if not isinstance(output, list) or len(output) != PROBE_TOKENS or counted != PROBE_TOKENS:
        raise WrongServer(
            f"{url}/generate: expected {PROBE_TOKENS} output_ids and as many completion_tokens for a probe that "
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
