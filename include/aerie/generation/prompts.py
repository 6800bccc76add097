"""The prompts of a data set as generation needs them: compact, in admission order, with the cap of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aerie.artefacts.prompts import PromptTokens, iterate_prompt_tokens
from aerie.artefacts.response_log import prompt_sha256
from aerie.settings.pipeline import DatasetSettings

HELD_OUT = "held_out"
NO_ROOM = "no_room_for_response"

# SGLang cuts max_new_tokens to (context length - 1) - prompt - 1 without a word; what is asked for must be what holds.
CONTEXT_RESERVE_TOKENS = 2


class GenerationPrompt(NamedTuple):
    """One prompt. ``prompt_ids`` are int32 [prompt_tokens]; one with a ``skip_reason`` is never generated."""

    sample_id: str
    split: str
    admission_rank: int
    prompt_ids: Sequence[int]
    prompt_sha256: str
    max_new_tokens: int
    skip_reason: str | None


def load_prompts(path: Path, dataset: DatasetSettings, *, context_length: int) -> list[GenerationPrompt]:
    """Every prompt of a data set, in admission order.

    Benchmark prompts are skipped as held out; so are those that leave less than ``minimum_new_tokens`` of the context.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    prompts = (_compact(prompt, dataset, context_length) for prompt in iterate_prompt_tokens(path))
    return sorted(prompts, key=lambda prompt: (prompt.admission_rank, prompt.sample_id))


def _compact(prompt: PromptTokens, dataset: DatasetSettings, context_length: int) -> GenerationPrompt:
    room = context_length - len(prompt.prompt_ids) - CONTEXT_RESERVE_TOKENS
    max_new_tokens = min(dataset.max_new_tokens, room)
    skip_reason = prompt.skip_reason
    if skip_reason is None and prompt.split == "benchmark":
        skip_reason = HELD_OUT
    if skip_reason is None and max_new_tokens < dataset.minimum_new_tokens:
        skip_reason = NO_ROOM
    return GenerationPrompt(
        sample_id=prompt.sample_id,
        split=prompt.split,
        admission_rank=prompt.admission_rank,
        prompt_ids=prompt.prompt_ids,
        prompt_sha256=prompt_sha256(prompt.prompt_ids),
        max_new_tokens=max(0, max_new_tokens),
        skip_reason=skip_reason,
    )
