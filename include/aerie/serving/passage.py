"""The teacher-forced probe: how likely a fixed passage is to the served model, and whether it was so at first.

Text looks plausible long after numbers are wrong. The mean log-probability of a passage moves with bad kernels, other
weights and lossy or corrupted caches. It is taken twice: computed from the first token on, and with its first half
read from the KV cache, which a computation in one piece need not touch.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from aerie.artefacts.files import fingerprint_of, write_text
from aerie.errors import BadInput
from aerie.serving.errors import WrongServer
from aerie.serving.host import host_facts
from aerie.serving.plan import ServerPlan
from aerie.settings.profile import Frozen

SHOWN_DIGITS = 4
SETTING = "serving.logprob_tolerance_nats"
CAUSES = (
    "likely causes: a kernel or an attention backend that computes wrongly on this GPU, a quantised KV cache, a "
    "corrupted cache (try it without hicache_size_gb_per_rank), or other weights under the same name"
)

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Sends the body of a ``/generate`` request, and returns its reply."""


class PassageScore(Frozen):
    """Mean log-probabilities, in nats a token.

    ``computed`` is over the whole passage; ``second_half`` over its second half in that same computation, and
    ``second_half_cached`` over the same tokens with the first half read from the KV cache (``cached_tokens`` of it).
    """

    computed: float
    second_half: float
    second_half_cached: float
    cached_tokens: int


class FirstLaunch(Frozen):
    """The score of a model's first launch, and where that was."""

    score: PassageScore
    model_identity: str
    dtype: str
    revision: str | None
    kv_cache_dtype: str
    sglang_version: str
    host: str
    gpu: str | None
    at: float


@dataclass(frozen=True)
class Launch:
    """Whose score it is: the server's folder, its SGLang, and what messages begin with."""

    folder: Path
    sglang_version: str
    where: str


class _Meta(BaseModel):
    model_config = ConfigDict(extra="ignore")

    input_token_logprobs: list[tuple[float | None, int, str | None]]
    cached_tokens: int


def first_launches_path(folder: Path) -> Path:
    """Scores of the first launch of each model, in a server's folder."""
    return folder / "first_launches.json"


def score_passage(ask: Ask, ids: Sequence[int], *, where: str) -> PassageScore:
    """Have the server score a passage of at least 8 tokens.

    Raises:
        WrongServer: log-probabilities are missing, of other tokens, or no numbers; the message begins with ``where``.
        NotReady: as ``ask`` raises.
    """
    half = len(ids) // 2
    whole, _ = _logprobs(ask, ids, start=0, where=where)
    again, cached_tokens = _logprobs(ask, ids, start=half, where=where)
    return PassageScore(
        computed=fmean(whole), second_half=fmean(whole[half:]), second_half_cached=fmean(again),
        cached_tokens=cached_tokens,
    )  # fmt: skip


def _logprobs(ask: Ask, ids: Sequence[int], *, start: int, where: str) -> tuple[list[float], int]:
    """Log-probabilities of the tokens after ``start``, each given all before it, and how many came from the cache.

    SGLang takes at most the tokens before ``start`` from its prefix cache.
    """
    reply = ask(
        {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start,
        }
    )
    try:
        meta = _Meta.model_validate(reply.get("meta_info"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise WrongServer(
            f"{where}: meta_info.{'.'.join(map(str, first['loc']))}: {first['msg']}: expected the log-probabilities of "
            "a passage"
        ) from error
    if [token for _, token, _ in meta.input_token_logprobs] != list(ids[start:]):
        raise WrongServer(f"{where}: input_token_logprobs are not of the {len(ids) - start} tokens that were sent")
    values = [math.nan if value is None else value for value, _, _ in meta.input_token_logprobs[1:]]
    wrong = sum(not math.isfinite(value) for value in values)
    if wrong:
        raise WrongServer(f"{where}: {wrong} of {len(values)} log-probabilities of a passage are no numbers; {CAUSES}")
    return values, meta.cached_tokens


def check_against_first_launch(
    score: PassageScore, ids: Sequence[int], plan: ServerPlan, tolerance_nats: float, *, launch: Launch
) -> None:
    """Hold a score against that of the model's first launch in this folder, which this one becomes where none was.

    A model is its identity, revision and dtype: not its KV cache's dtype, which must not make a difference.

    Raises:
        WrongServer: it differs by more than the tolerance, or the score with the cache from that without.
        BadInput: the file of first launches is damaged.
    """
    where, expected = launch.where, f"expected a difference of at most {tolerance_nats:g} ({SETTING})"
    if not abs(score.second_half_cached - score.second_half) <= tolerance_nats:
        raise WrongServer(
            f"{where}: a passage has a mean log-probability of {_nats(score.second_half_cached)} with its beginning "
            f"read from the KV cache ({plan.kv_cache_dtype}), and {_nats(score.second_half)} computed in one piece: "
            f"{expected}; {CAUSES}"
        )
    path = first_launches_path(launch.folder)
    launches = _read(path)
    key = fingerprint_of([plan.model_identity, plan.revision, plan.dtype, list(ids)])[:16]
    first = launches.get(key)
    if first is None:
        _write(path, {**launches, key: _first_launch(score, plan, launch.sglang_version)})
        return
    pairs = ((score.computed, first.score.computed), (score.second_half_cached, first.score.second_half_cached))
    for now, then in pairs:
        if not abs(now - then) <= tolerance_nats:
            raise WrongServer(
                f"{where}: a passage has a mean log-probability of {_nats(now)} (SGLang {launch.sglang_version}, KV "
                f"cache {plan.kv_cache_dtype}), and had {_nats(then)} at this model's first launch "
                f"({_described(first)}): {expected}; {CAUSES}. If it was the first launch that was wrong, remove {path}"
            )


def _first_launch(score: PassageScore, plan: ServerPlan, sglang_version: str) -> FirstLaunch:
    facts = host_facts()
    return FirstLaunch(
        score=score,
        model_identity=plan.model_identity,
        dtype=plan.dtype,
        revision=plan.revision,
        kv_cache_dtype=plan.kv_cache_dtype,
        sglang_version=sglang_version,
        host=facts.hostname,
        gpu=facts.gpus[0].name if facts.gpus else None,
        at=time.time(),
    )


def _described(first: FirstLaunch) -> str:
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.at))
    return (
        f"{day}, host {first.host}, {first.gpu or 'no GPU'}, SGLang {first.sglang_version}, KV {first.kv_cache_dtype}"
    )


def _nats(value: float) -> str:
    return f"{value:.{SHOWN_DIGITS}f} nats"


_LAUNCHES = TypeAdapter(dict[str, FirstLaunch])


def _read(path: Path) -> dict[str, FirstLaunch]:
    try:
        return _LAUNCHES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BadInput(
            f"{path}: not the first launches of models: {first['msg']}; remove it, and the next launch begins it"
        ) from error


def _write(path: Path, launches: dict[str, FirstLaunch]) -> None:
    write_text(path, _LAUNCHES.dump_json(launches, indent=2).decode() + "\n")
