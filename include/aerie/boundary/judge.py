"""One response's verdict, from token ids alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aerie.boundary.channels import ChannelWalk
from aerie.boundary.cycles import find_cycles
from aerie.boundary.grammar import Grammar, Kind, ends_with
from aerie.boundary.rules import CORRUPT, FLAGS, POLICY_PREFIX, RULES, SUPPRESSED_BY_CUT, TEXT_RULES
from aerie.boundary.walk import Span, ToolCall, Walk
from aerie.errors import BadInput

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
FinishReason = str | Mapping[str, Any] | None

LOOP_SHARE = 4
"""A cycle is a loop when it covers more than one part in this many of the response."""

ECHO_TOKENS = 16
"""Tokens of the prompt that a response may begin with by chance, when none of them is special."""

_FINISH_TYPES = ("stop", "length", "abort")


@dataclass(frozen=True)
class Verdict:
    """What the rules say of one response.

    ``reasons`` are corrupt, ``flags`` the verifier's own behaviour, in the order of ``aerie.boundary.rules``.
    ``positions`` gives for each of both the indices into the response of the tokens to blame (none where the fault is
    an absence). ``unchecked`` names rules that could not be applied for want of an input. ``tool_calls`` counts the
    complete calls, which ``calls`` locates; ``spans`` covers the response without gaps. ``end`` is the index of the
    end token.
    """

    verdict: Literal["kept", "quarantined"]
    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    positions: Mapping[str, tuple[int, ...]]
    unchecked: tuple[str, ...]
    reasoning_tokens: int
    answer_tokens: int
    tool_calls: int
    end: int | None = None
    calls: tuple[ToolCall, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the row may be trained on."""
        return self.verdict == "kept"


def judge(
    prompt_ids: TokenIds,
    output_ids: TokenIds,
    *,
    grammar: Grammar,
    finish_reason: FinishReason = None,
    completion_tokens: int | None = None,
    max_new_tokens: int | None = None,
) -> Verdict:
    """Judge one response.

    Args:
        prompt_ids: the prompt, exactly as the server saw it.
        output_ids: the response, the end token included; any integers.
        grammar: the verifier's compiled profile.
        finish_reason: ``stop``, ``length`` or ``abort``, or SGLang's dictionary with that as ``type``; None when it is
            not known: a response of ``max_new_tokens`` without an end then counts as cut by the cap.
        completion_tokens: the server's own count.
        max_new_tokens: the cap that the request was sent with.

    Raises:
        BadInput: ``finish_reason`` is none of the above.
    """
    finish = finish_type(finish_reason)
    prompt = as_ids(prompt_ids, grammar)
    output = as_ids(output_ids, grammar)
    codes = grammar.classify_response(output)
    walk = _walk(codes, output, grammar)
    walk.run(grammar.prompt_end(prompt, output))
    if prompt.size and grammar.classify(prompt).max() == Kind.OUT_OF_RANGE:
        walk.mark("id_out_of_range")
    if completion_tokens is not None and completion_tokens != output.size:
        walk.mark("count_mismatch")
    if echo := _echoed_tokens(prompt, output, grammar):
        walk.mark("prompt_echoed", 0, echo - 1)
    _mark_finish(walk, finish, max_new_tokens)
    _mark_cycles(walk, output)
    _apply_precedence(walk)
    return _verdict(walk, _unchecked(walk, finish, completion_tokens))


def _walk(codes: NDArray[np.uint8], output: NDArray[np.int64], grammar: Grammar) -> Walk:
    if grammar.channels is None:
        return Walk(codes, output, grammar)
    return ChannelWalk(codes, output, grammar, names=grammar.channels)


def finish_type(finish_reason: FinishReason) -> str | None:
    """The finish reason's type.

    Raises:
        BadInput: it is none of stop, length and abort.
    """
    if finish_reason is None:
        return None
    kind = finish_reason.get("type") if isinstance(finish_reason, Mapping) else finish_reason
    if kind not in _FINISH_TYPES:
        raise BadInput(f"finish reason {finish_reason!r}: expected one of {', '.join(_FINISH_TYPES)}, or SGLang's form")
    return str(kind)


def apply_policy(verdict: Verdict, drop_flags: Iterable[str]) -> Verdict:
    """The verdict under a data set's policy: each flag in ``drop_flags`` becomes a reason ``policy:<flag>``."""
    dropped = tuple(POLICY_PREFIX + flag for flag in verdict.flags if flag in frozenset(drop_flags))
    if not dropped:
        return verdict
    return replace(verdict, verdict="quarantined", reasons=verdict.reasons + dropped)


def with_marks(verdict: Verdict, marks: Mapping[str, Sequence[int]], unchecked: Sequence[str]) -> Verdict:
    """The verdict with more reasons or flags, and with ``unchecked`` replaced."""
    positions = {**verdict.positions, **{name: tuple(at) for name, at in marks.items()}}
    reasons = _ordered(CORRUPT, positions)
    kept = verdict.kept and not reasons
    return replace(
        verdict,
        verdict="kept" if kept else "quarantined",
        reasons=reasons + tuple(r for r in verdict.reasons if r.startswith(POLICY_PREFIX)),
        flags=_ordered(FLAGS, positions),
        positions=positions,
        unchecked=tuple(unchecked),
    )


def response_mask(prompt_tokens: int, response_tokens: int, end: int | None) -> NDArray[np.int8]:
    """Loss mask of a generated row, int8 [prompt_tokens + response_tokens].

    Zeros for the prompt, ones for the response to its end token inclusive (to its last token where the cap cut it),
    zeros after.
    """
    mask = np.zeros(prompt_tokens + response_tokens, dtype=np.int8)
    trained = response_tokens if end is None else end + 1
    mask[prompt_tokens : prompt_tokens + trained] = 1
    return mask


def as_ids(ids: TokenIds, grammar: Grammar) -> NDArray[np.int64]:
    """``ids`` as int64 [n]; an integer that does not fit becomes -1, which is outside every vocabulary too."""
    try:
        return np.ascontiguousarray(ids, dtype=np.int64)
    except OverflowError:
        return np.array([i if 0 <= i < grammar.vocabulary_size else -1 for i in ids], dtype=np.int64)


def _echoed_tokens(prompt: NDArray[np.int64], output: NDArray[np.int64], grammar: Grammar) -> int:
    """How many tokens the response begins with that repeat its prompt, from the prompt's start or as its tail.

    SGLang's detokenizer has returned its context, a handful of tokens before the response. A few equal tokens are
    chance, unless one of them is special and foreign to a response, or a tag.
    """
    shared = min(prompt.size, output.size)
    if shared <= 1:
        return 0
    from_start = 0
    if prompt[0] == output[0]:
        differing = np.flatnonzero(prompt[:shared] != output[:shared])
        from_start = int(differing[0]) if differing.size else shared
    starts = np.flatnonzero((prompt[:-1] == output[0]) & (prompt[1:] == output[1]))
    lengths = [prompt.size - start for start in starts.tolist() if prompt.size - start <= shared]
    as_tail = next((n for n in lengths if ends_with(prompt, tuple(output[:n].tolist()))), 0)
    for length in sorted((from_start, as_tail), reverse=True):
        if length >= ECHO_TOKENS or (length > 1 and _holds_tag_or_foreign(output[:length], grammar)):
            return length
    return 0


def _holds_tag_or_foreign(ids: NDArray[np.int64], grammar: Grammar) -> bool:
    return bool(np.isin(grammar.classify(ids), (Kind.OPEN, Kind.FOREIGN)).any())


def _mark_finish(walk: Walk, finish: str | None, max_new_tokens: int | None) -> None:
    """Hold the server's finish reason against the walk's end."""
    tokens = int(walk.codes.size)
    at_cap = max_new_tokens is None or tokens >= max_new_tokens
    if finish == "abort":
        walk.mark("aborted")
    elif finish == "stop":
        if walk.end is None:
            walk.mark("stop_without_end")
    elif walk.end is None:
        if tokens and (finish == "length" or (max_new_tokens is not None and at_cap)):
            walk.mark(walk.cut_flag())
    elif finish == "length" and not at_cap:
        walk.mark("end_without_stop", walk.end)
    elif finish == "length" and walk.end == tokens - 1:
        walk.mark("ended_at_cap", walk.end)


def _mark_cycles(walk: Walk, output: NDArray[np.int64]) -> None:
    """Mark ``loop``, or else every ``repetition``, by first and last index."""
    if walk.codes.size and walk.codes.max() == Kind.OUT_OF_RANGE:
        output = np.where(walk.codes == Kind.OUT_OF_RANGE, walk.grammar.vocabulary_size, output)
    tokens = int(walk.codes.size)
    closing = _closing_start(walk)
    repetitions: list[int] = []
    for cycle in find_cycles(output):
        if cycle.stop >= closing or cycle.tokens * LOOP_SHARE > tokens:
            walk.mark("loop", cycle.start, cycle.stop - 1)
            return
        repetitions += [cycle.start, cycle.stop - 1]
    if repetitions:
        walk.mark("repetition", *repetitions)


def _closing_start(walk: Walk) -> int:
    """Index of the first of the special tokens with which the response ends."""
    ordinary = np.flatnonzero(walk.codes <= Kind.WHITESPACE)
    return int(ordinary[-1]) + 1 if ordinary.size else 0


def _apply_precedence(walk: Walk) -> None:
    marks = walk.marks
    if "aborted" in marks or any(name.startswith("truncated_") for name in marks):
        for name in SUPPRESSED_BY_CUT:
            marks.pop(name, None)
    if "tool_nested" in marks:
        marks.pop("tool_unbalanced", None)


def _ordered(group: frozenset[str], positions: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(name for name in RULES if name in positions and name in group)


def _unchecked(walk: Walk, finish: str | None, completion_tokens: int | None) -> tuple[str, ...]:
    return tuple(
        chain(
            () if finish else ("stop_without_end", "end_without_stop", "aborted"),
            () if completion_tokens is not None else ("count_mismatch",),
            TEXT_RULES if walk.calls else (),
        )
    )


def _verdict(walk: Walk, unchecked: tuple[str, ...]) -> Verdict:
    positions = {name: tuple(sorted(set(at))) for name, at in walk.marks.items()}
    reasons = _ordered(CORRUPT, positions)
    return Verdict(
        verdict="quarantined" if reasons else "kept",
        reasons=reasons,
        flags=_ordered(FLAGS, positions),
        positions=positions,
        unchecked=unchecked,
        reasoning_tokens=walk.reasoning_tokens,
        answer_tokens=walk.answer_tokens,
        tool_calls=len(walk.calls),
        end=walk.end,
        calls=tuple(walk.calls),
        spans=tuple(walk.spans),
    )
