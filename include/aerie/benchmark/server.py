"""The server that is measured: ensured through the keeper, and asked what it really runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.artefacts.files import fingerprint_of, sha256_of
from aerie.benchmark.checklist import ALGORITHM
from aerie.errors import BadInput, Failed, Retryable
from aerie.serving.client import held
from aerie.serving.configured import ensure_for_stage, plan_configured
from aerie.serving.plan import DrafterPlan, checkpoint_identity
from aerie.settings.pipeline import AROUND_THE_SERVER, DraftSettings
from aerie.stages import Events, StageRequest

ANSWER_SECONDS = 30.0
LIKELY_SECONDS = 600.0
MOST_LIKELY = 8
NOT_MEASURED = AROUND_THE_SERVER | {"host", "port"}
"""Fields of ``ServingSettings`` that no figure depends on."""


@contextmanager
def benchmark_server(
    request: StageRequest, drafter: Path | None, drafting: DraftSettings, events: Events
) -> Iterator[str]:
    """Have a server of phase ``benchmark`` with this drafter, or without one; hold it and yield its URL.

    It replaces the run's server, and is left running: the next one, or ``serve_stop``, ends it.

    Raises:
        BadInput: the settings cannot be served.
        AerieError: as ``ensure_server`` and ``held`` raise.
    """
    settings = request.settings
    plan = plan_configured(settings, "benchmark", drafter=drafter_plan(drafter, drafting))
    handle = ensure_for_stage(request, plan, events)
    with held(handle, lease_seconds=settings.serving.lease_seconds):
        yield handle.url


def drafter_plan(drafter: Path | None, asked: DraftSettings) -> DrafterPlan | None:
    """The drafter as the server is to run it.

    Raises:
        BadInput: there is no drafter in the folder.
    """
    if drafter is None:
        return None
    try:
        identity = checkpoint_identity(drafter)
    except OSError as error:
        raise BadInput(f"{drafter}: the drafter cannot be read: {error}; run stage export first") from error
    return DrafterPlan(
        path=drafter,
        identity=identity,
        num_steps=asked.num_steps,
        eagle_topk=asked.eagle_topk,
        num_draft_tokens=asked.num_draft_tokens,
    )


class ServerFacts(BaseModel):
    """What the server says at ``/server_info``, as far as a benchmark depends on it."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    version: str
    model_path: str
    dtype: str
    max_total_num_tokens: int
    speculative_algorithm: str | None
    speculative_draft_model_path: str | None
    speculative_num_steps: int | None
    speculative_eagle_topk: int | None
    speculative_num_draft_tokens: int | None
    speculative_draft_window_size: int | None


def read_server_facts(url: str) -> ServerFacts:
    """Ask the server what it runs.

    Raises:
        Retryable: it does not answer.
        Failed: its answer lacks a field; the message names it.
    """
    try:
        answer = requests.get(f"{url.rstrip('/')}/server_info", timeout=ANSWER_SECONDS)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise Retryable(f"the server at {url} does not say what it runs: {error}") from error
    try:
        return ServerFacts.model_validate_json(answer.content)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, one["loc"])) for one in error.errors(include_url=False))
        raise Failed(f"{url}/server_info: not what a benchmark needs of SGLang: {fields}") from error


def verifier_identity(folder: Path) -> str:
    """Identity of a verifier's checkpoint that a copy of it shares: its configuration, names and sizes of its weights.

    Raises:
        BadInput: there is no checkpoint.
    """
    try:
        files = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
        return fingerprint_of({"config": sha256_of(folder / "config.json"), "files": files})
    except OSError as error:
        raise BadInput(f"{folder}: the verifier cannot be read: {error}") from error


def flush_cache(url: str) -> None:
    """Empty the prefix cache of a server of ours, so that prompts sent before cost what they cost.

    Raises:
        Retryable: it does not answer.
    """
    try:
        requests.post(f"{url.rstrip('/')}/flush_cache", timeout=ANSWER_SECONDS).raise_for_status()
    except requests.RequestException as error:
        raise Retryable(f"the server at {url} does not empty its cache: {error}") from error


class _LikelyMeta(BaseModel):
    output_top_logprobs: list[list[tuple[float, int, str | None]]]


class _LikelyReply(BaseModel):
    meta_info: _LikelyMeta


def most_likely(url: str, ids: Sequence[int]) -> dict[int, float]:
    """Log-probabilities in nats of the ``MOST_LIKELY`` likeliest tokens after ``ids``, by token id.

    Raises:
        Retryable: the server does not answer.
        Failed: its answer lacks them.
    """
    asked = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": MOST_LIKELY,
    }
    try:
        answer = requests.post(f"{url.rstrip('/')}/generate", json=asked, timeout=LIKELY_SECONDS)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise Retryable(f"the server at {url} does not say which tokens are likely: {error}") from error
    try:
        (likely,) = _LikelyReply.model_validate_json(answer.content).meta_info.output_top_logprobs
    except (ValidationError, ValueError) as error:
        raise Failed(f"{url}/generate: expected meta_info.output_top_logprobs of one token: {error}") from error
    return {token: value for value, token, _ in likely}


def require_drafter(facts: ServerFacts, drafter: Path | None, asked: DraftSettings) -> None:
    """Require that the server runs exactly the drafter and the settings that are to be measured.

    Raises:
        Failed: with what it runs and what was asked for.
    """
    expected: dict[str, Any] = {"speculative_algorithm": None}
    if drafter is not None:
        expected = {
            "speculative_algorithm": ALGORITHM,
            "speculative_draft_model_path": str(drafter),
            "speculative_num_steps": asked.num_steps,
            "speculative_eagle_topk": asked.eagle_topk,
            "speculative_num_draft_tokens": asked.num_draft_tokens,
        }
    found = facts.model_dump()
    wrong = [f"{name} is {found[name]!r}, not {value!r}" for name, value in expected.items() if found[name] != value]
    if wrong:
        raise Failed(f"the server does not run what is to be measured: {'; '.join(wrong)}; stop it and run again")
