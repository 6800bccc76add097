"""Rows that come with ids and a loss mask: every trained segment is a response to what stands before it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aerie.boundary.grammar import Grammar, PromptEnd
from aerie.boundary.judge import TokenIds, Verdict, as_ids, judge, with_marks
from aerie.boundary.rules import CORRUPT, FLAGS, RULES
from aerie.boundary.walk import Span, ToolCall


def trained_segments(loss_mask: NDArray[np.integer[Any]]) -> list[tuple[int, int]]:
    """Runs of ones in ``loss_mask`` [n] as (start, stop) pairs, stop exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], loss_mask, [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def judge_mask(input_ids: TokenIds, loss_mask: TokenIds, grammar: Grammar, *, may_be_cut: bool = False) -> Verdict:
    """Judge each trained segment of a row as the response to all tokens before it.

    A mask that is off by one shows as ``prompt_not_open``, ``no_open``, ``missing_end`` or ``tokens_after_end``: what
    stands before a segment must end as the family's prompts do, though the family does not reason.
    Finish reason and cap are not known for such rows; one that ``may_be_cut`` may do without an end at its last token.
    Positions, calls and spans of the verdict are indices into ``input_ids``; counts are sums.
    """
    mask = np.asarray(loss_mask)
    if mask.size != len(input_ids) or not np.isin(mask, (0, 1)).all():
        return _unusable("mask_mismatch")
    segments = trained_segments(mask.astype(np.int8))
    if not segments:
        return _unusable("mask_empty")
    verdicts = [
        _judge_segment(
            input_ids[:start],
            input_ids[start:stop],
            grammar,
            cap=stop - start if may_be_cut and stop == len(input_ids) else None,
        )
        for start, stop in segments
    ]
    return _merged(verdicts, segments, len(input_ids))


def _judge_segment(before: TokenIds, trained: TokenIds, grammar: Grammar, *, cap: int | None) -> Verdict:
    verdict = judge(before, trained, grammar=grammar, max_new_tokens=cap)
    leaves = grammar.prompt_end(as_ids(before, grammar), as_ids(trained, grammar))
    if grammar.opens_in == "never" and leaves is PromptEnd.NEITHER:
        return with_marks(verdict, {"prompt_not_open": ()}, verdict.unchecked)
    return verdict


def _unusable(reason: str) -> Verdict:
    return Verdict(
        verdict="quarantined",
        reasons=(reason,),
        flags=(),
        positions={reason: ()},
        unchecked=(),
        reasoning_tokens=0,
        answer_tokens=0,
        tool_calls=0,
    )


def _merged(verdicts: Sequence[Verdict], segments: Sequence[tuple[int, int]], tokens: int) -> Verdict:
    positions: dict[str, tuple[int, ...]] = {}
    spans: list[Span] = []
    calls: list[ToolCall] = []
    covered = 0
    for verdict, (start, stop) in zip(verdicts, segments, strict=True):
        for name, at in verdict.positions.items():
            positions[name] = positions.get(name, ()) + tuple(index + start for index in at)
        if covered < start:
            spans.append(Span("prompt", covered, start))
        spans += [Span(span.kind, span.start + start, span.stop + start) for span in verdict.spans]
        calls += [
            ToolCall(c.id_start + start, c.id_stop + start, c.arguments_start + start, c.arguments_stop + start)
            for c in verdict.calls
        ]
        covered = stop
    if covered < tokens:
        spans.append(Span("prompt", covered, tokens))
    reasons = tuple(name for name in RULES if name in positions and name in CORRUPT)
    return Verdict(
        verdict="quarantined" if reasons else "kept",
        reasons=reasons,
        flags=tuple(name for name in RULES if name in positions and name in FLAGS),
        positions=positions,
        unchecked=tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.unchecked)),
        reasoning_tokens=sum(verdict.reasoning_tokens for verdict in verdicts),
        answer_tokens=sum(verdict.answer_tokens for verdict in verdicts),
        tool_calls=sum(verdict.tool_calls for verdict in verdicts),
        calls=tuple(calls),
        spans=tuple(spans),
    )
