"""A data set's rows with their verdicts, from its response log or from rows that came already tokenised."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aerie.artefacts.imported import iterate_imported
from aerie.artefacts.prompts import Prompt, Split, iterate_prompts
from aerie.artefacts.response_log import Response, latest_responses, prompt_sha256
from aerie.boundary.grammar import Grammar
from aerie.boundary.judge import Verdict, judge, response_mask, with_marks
from aerie.boundary.segments import judge_mask
from aerie.boundary.text_rules import Decode, check_tool_calls, declared_tools
from aerie.boundary.walk import Span

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class JudgedRow:
    """One row of a data set.

    ``input_ids`` [S] and ``loss_mask`` [S] are what would be trained on; ``spans`` cover them without gaps.
    ``completion_tokens`` is the number of ids in the response (of ones in an imported mask).
    """

    sample_id: str
    conversation_id: str
    split: Split
    input_ids: NDArray[np.integer[Any]]
    loss_mask: NDArray[np.int8]
    prompt_tokens: int
    completion_tokens: int
    verdict: Verdict
    spans: tuple[Span, ...]

    @property
    def response_tokens(self) -> int:
        """Tokens that would be trained on."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, eq=False)
class _StoredPrompt:
    conversation_id: str
    split: Split
    ids: Ids
    tools: str | None

    @classmethod
    def of(cls, prompt: Prompt) -> "_StoredPrompt":
        # Four bytes an id instead of a Python object each: a data set's prompts fit into memory.
        ids = np.array(prompt.prompt_ids, dtype=np.int32)
        return cls(prompt.conversation_id, prompt.split, ids, prompt.tools)


_NO_PROMPT = _StoredPrompt("", "train", np.empty(0, np.int32), None)

_declared_tools = lru_cache(maxsize=1024)(declared_tools)


class GeneratedRows:
    """Rows of ``prompts.parquet`` and the newest response of each in the response log, judged one at a time.

    ``sample_ids`` are those to be known, by default all.
    """

    def __init__(
        self,
        prompts: Path,
        responses: Path,
        grammar: Grammar,
        decode: Decode,
        *,
        sample_ids: Collection[str] | None = None,
    ) -> None:
        self._responses = responses
        self._grammar = grammar
        self._decode = decode
        self._prompts = {
            prompt.sample_id: _StoredPrompt.of(prompt)
            for prompt in iterate_prompts(prompts)
            if prompt.skip_reason is None and (sample_ids is None or prompt.sample_id in sample_ids)
        }

    def __iter__(self) -> Iterator[JudgedRow]:
        """Yield rows in the order of the log.

        Raises:
            Failed: the log holds a damaged row.
        """
        for response in latest_responses(self._responses):
            yield self.judge(response)

    def judge(self, response: Response) -> JudgedRow:
        """The row of one response."""
        prompt = self._prompts.get(response.sample_id, _NO_PROMPT)
        output = np.array(response.output_ids, dtype=np.int64)
        verdict = judge(
            prompt.ids,
            output,
            grammar=self._grammar,
            finish_reason=response.finish_reason,
            completion_tokens=response.completion_tokens,
            max_new_tokens=response.max_new_tokens,
        )
        if prompt_sha256(prompt.ids.tolist()) != response.prompt_sha256:
            verdict = with_marks(verdict, {"prompt_mismatch": ()}, verdict.unchecked)
        verdict = check_tool_calls(
            verdict,
            response.output_ids,
            decode=self._decode,
            tools=_declared_tools(prompt.tools),
            grammar=self._grammar,
        )
        offset = prompt.ids.size
        return JudgedRow(
            sample_id=response.sample_id,
            conversation_id=prompt.conversation_id,
            split=prompt.split,
            input_ids=np.concatenate((prompt.ids, output)),
            loss_mask=response_mask(offset, output.size, verdict.end),
            prompt_tokens=offset,
            completion_tokens=output.size,
            verdict=verdict,
            spans=_after_prompt(verdict.spans, offset),
        )


class TokenisedRows:
    """Rows of ``imported.parquet``, judged one at a time."""

    def __init__(self, imported: Path, grammar: Grammar, decode: Decode) -> None:
        self._imported = imported
        self._grammar = grammar
        self._decode = decode

    def __iter__(self) -> Iterator[JudgedRow]:
        """Yield rows in file order."""
        for row in iterate_imported(self._imported):
            verdict = judge_mask(row.input_ids, row.loss_mask, self._grammar)
            # Which tools the prompt declared is known to no one here.
            verdict = check_tool_calls(verdict, row.input_ids, decode=self._decode, tools=None, grammar=self._grammar)
            mask = np.array(row.loss_mask, dtype=np.int8)
            trained = int(np.count_nonzero(mask))
            yield JudgedRow(
                sample_id=row.sample_id,
                conversation_id=row.conversation_id,
                split=row.split,
                input_ids=np.array(row.input_ids, dtype=np.int32),
                loss_mask=mask,
                prompt_tokens=mask.size - trained,
                completion_tokens=trained,
                verdict=verdict,
                spans=verdict.spans or (Span("prompt", 0, len(row.input_ids)),),
            )


def _after_prompt(spans: Sequence[Span], offset: int) -> tuple[Span, ...]:
    moved = tuple(Span(span.kind, span.start + offset, span.stop + offset) for span in spans)
    return (Span("prompt", 0, offset), *moved) if offset else moved


def decoder(tokenizer: Any, vocabulary_size: int) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text: special tokens are kept, an id outside the vocabulary shows as ``[id N]``."""

    def decode(ids: Sequence[int]) -> str:
        listed = [int(i) for i in ids]
        if all(0 <= i < vocabulary_size for i in listed):
            text: str = tokenizer.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text
        return "".join(decode([i]) if 0 <= i < vocabulary_size else f"[id {i}]" for i in listed)

    return decode
