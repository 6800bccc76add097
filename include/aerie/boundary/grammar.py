"""A profile and a tokenizer's ids, compiled to a small automaton over special tokens.

The bulk of a response is ordinary tokens, which one table look-up classifies; the automaton moves only at special
tokens (a handful a row). States are regions of a response; every special token has the region that it begins and the
regions that it may follow.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from aerie.errors import BadInput
from aerie.settings.profile import Profile


class Kind(IntEnum):
    """What a token id is to the grammar. Kinds above ``WHITESPACE`` are events of the walk."""

    ORDINARY = 0
    WHITESPACE = 1
    OPEN = 2
    CLOSE = 3
    SECTION_BEGIN = 4
    CALL_BEGIN = 5
    ARGUMENT_BEGIN = 6
    CALL_END = 7
    SECTION_END = 8
    END = 9
    FOREIGN = 10
    OUT_OF_RANGE = 11


class Region(StrEnum):
    """A region of a response, which is also a state of the automaton."""

    REASONING = "reasoning"
    ANSWER = "answer"
    SECTION = "tool_section"
    CALL_ID = "tool_id"
    ARGUMENTS = "tool_arguments"
    AFTER_TOOLS = "after_tools"
    ENDED = "after_end"


class PromptEnd(StrEnum):
    """How a prompt leaves reasoning."""

    OPEN = "open"
    CLOSED = "closed"
    NEITHER = "neither"


TOOL_KINDS = frozenset({Kind.SECTION_BEGIN, Kind.CALL_BEGIN, Kind.ARGUMENT_BEGIN, Kind.CALL_END, Kind.SECTION_END})
IN_TOOLS = frozenset({Region.SECTION, Region.CALL_ID, Region.ARGUMENTS})
IN_CALL = frozenset({Region.CALL_ID, Region.ARGUMENTS})

BEGINS: Mapping[Kind, Region] = {
    Kind.CLOSE: Region.ANSWER,
    Kind.SECTION_BEGIN: Region.SECTION,
    Kind.CALL_BEGIN: Region.CALL_ID,
    Kind.ARGUMENT_BEGIN: Region.ARGUMENTS,
    Kind.CALL_END: Region.SECTION,
    Kind.SECTION_END: Region.AFTER_TOOLS,
    Kind.END: Region.ENDED,
}
"""The region that begins after a token."""

MAY_FOLLOW: Mapping[Kind, frozenset[Region]] = {
    Kind.SECTION_BEGIN: frozenset({Region.ANSWER}),
    Kind.CALL_BEGIN: frozenset({Region.SECTION}),
    Kind.ARGUMENT_BEGIN: frozenset({Region.CALL_ID}),
    Kind.CALL_END: frozenset({Region.ARGUMENTS}),
    Kind.SECTION_END: frozenset({Region.SECTION}),
}
"""The regions in which a tool token is in its order."""

NESTS_IN: Mapping[Kind, frozenset[Region]] = {Kind.SECTION_BEGIN: IN_TOOLS, Kind.CALL_BEGIN: IN_CALL}
"""The regions in which a tool token opens a section or a call inside another."""


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled profile.

    ``kinds`` is uint8 [vocabulary_size], a ``Kind`` per token id. ``open_tail`` are the ids with which a prompt that
    leaves reasoning open ends, ``closed_tail`` those with which it ends when thinking is off; both are empty for a
    family that does not reason. ``tool_id_pattern`` has groups ``name`` and ``index``; None without tools.
    """

    profile: str
    kinds: NDArray[np.uint8]
    opens_in: str
    open_tail: tuple[int, ...]
    closed_tail: tuple[int, ...]
    closed_by_tools: bool
    tool_id_pattern: str | None

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return int(self.kinds.size)

    def classify(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Kind of every id in ``ids`` (int64 [n], any values) as uint8 [n]."""
        # One comparison for both ends: a negative id is a huge unsigned one.
        outside = ids.view(np.uint64) >= self.kinds.size
        if not outside.any():
            return self.kinds[ids]
        kinds = self.kinds[np.where(outside, 0, ids)]
        kinds[outside] = Kind.OUT_OF_RANGE
        return kinds

    def prompt_end(self, prompt: NDArray[np.int64]) -> PromptEnd:
        """Whether ``prompt`` leaves reasoning open, closed (thinking off), or neither."""
        if self.closed_tail and ends_with(prompt, self.closed_tail):
            return PromptEnd.CLOSED
        if self.open_tail and ends_with(prompt, self.open_tail):
            return PromptEnd.OPEN
        return PromptEnd.NEITHER


def ends_with(ids: NDArray[np.int64], tail: tuple[int, ...]) -> bool:
    """Whether ``ids`` ends with ``tail``."""
    return tuple(ids[-len(tail) :].tolist()) == tail


def compile_grammar(
    profile: Profile,
    token_ids: Mapping[str, int],
    vocabulary_size: int,
    *,
    whitespace_ids: Iterable[int] = (),
) -> Grammar:
    """Compile ``profile`` for a verifier.

    Args:
        profile: the verifier's family.
        token_ids: the verifier's special and added tokens with their ids. Each that the profile gives no role in a
            response is foreign to one.
        vocabulary_size: number of ids that the verifier can produce.
        whitespace_ids: ids of tokens that are only white space.

    Raises:
        BadInput: a token of the profile is missing from ``token_ids``, has another id than the profile expects or an
            id outside the vocabulary, or has two roles.
    """
    if vocabulary_size < 1:
        raise BadInput(f"profile {profile.name}: vocabulary size {vocabulary_size}: expected at least 1")
    _check_expected(profile, token_ids)
    kinds = np.zeros(vocabulary_size, dtype=np.uint8)
    for token, token_id in token_ids.items():
        kinds[_inside(profile, token, token_id, vocabulary_size)] = Kind.FOREIGN
    # After the added tokens: some tokenizers add runs of spaces, and a prompt's tail may name a newline.
    for token_id in whitespace_ids:
        kinds[_inside(profile, "a white-space token", token_id, vocabulary_size)] = Kind.WHITESPACE
    for token in profile.response_tokens_allowed:
        kinds[_id_of(profile, token, token_ids)] = Kind.ORDINARY
    taken: dict[int, str] = {}
    for token, kind in _roles(profile):
        token_id = _id_of(profile, token, token_ids)
        if token_id in taken:
            raise BadInput(f"profile {profile.name}: {token!r} and {taken[token_id]!r} are one id, {token_id}")
        taken[token_id] = token
        kinds[token_id] = kind
    return Grammar(
        profile=profile.name,
        kinds=kinds,
        opens_in=profile.reasoning.opens_in,
        open_tail=tuple(_id_of(profile, token, token_ids) for token in _open_tail(profile)),
        closed_tail=tuple(_id_of(profile, token, token_ids) for token in _closed_tail(profile)),
        closed_by_tools=profile.reasoning.closed_by_tools,
        tool_id_pattern=profile.tools.id_pattern if profile.tools else None,
    )


def _roles(profile: Profile) -> Iterator[tuple[str, Kind]]:
    if profile.reasoning.opens_in != "never":
        yield _boundary(profile, profile.reasoning.open, "open"), Kind.OPEN
        yield _boundary(profile, profile.reasoning.close, "close"), Kind.CLOSE
    if profile.tools is not None:
        yield profile.tools.section_begin, Kind.SECTION_BEGIN
        yield profile.tools.call_begin, Kind.CALL_BEGIN
        yield profile.tools.argument_begin, Kind.ARGUMENT_BEGIN
        yield profile.tools.call_end, Kind.CALL_END
        yield profile.tools.section_end, Kind.SECTION_END
    for token in profile.end_of_turn:
        yield token, Kind.END


def _boundary(profile: Profile, token: str | None, which: str) -> str:
    if token is None:
        raise BadInput(f"profile {profile.name}: reasoning.{which} is not set, and the family reasons")
    return token


def _open_tail(profile: Profile) -> tuple[str, ...]:
    """Open tag, and what the generation prompt puts behind it (MiniMax: a newline)."""
    token = profile.reasoning.open
    if profile.reasoning.opens_in == "never" or token is None:
        return ()
    tail = profile.generation_prompt_tail
    return tail[tail.index(token) :] if token in tail else (token,)


def _closed_tail(profile: Profile) -> tuple[str, ...]:
    reasoning = profile.reasoning
    if reasoning.opens_in == "never" or reasoning.open is None or reasoning.close is None:
        return ()
    return (reasoning.open, reasoning.close)


def _check_expected(profile: Profile, token_ids: Mapping[str, int]) -> None:
    for token, expected in profile.expected_ids.items():
        found = token_ids.get(token)
        if found != expected:
            raise BadInput(
                f"profile {profile.name}: {token!r} has id {found} in this verifier, expected {expected}: "
                "the checkpoint is of another family or revision; choose the profile that fits it"
            )


def _id_of(profile: Profile, token: str, token_ids: Mapping[str, int]) -> int:
    if token not in token_ids:
        raise BadInput(
            f"profile {profile.name}: the verifier has no special token {token!r}; "
            "choose the profile of its family, or prepare its data set again"
        )
    return token_ids[token]


def _inside(profile: Profile, token: str, token_id: int, vocabulary_size: int) -> int:
    if not 0 <= token_id < vocabulary_size:
        raise BadInput(f"profile {profile.name}: {token!r} has id {token_id}, outside 0 to {vocabulary_size - 1}")
    return token_id
