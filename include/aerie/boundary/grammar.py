"""A profile and a tokenizer's ids, compiled to a small automaton over special tokens.

The bulk of a response is ordinary tokens, which one table look-up classifies; the automaton moves only at special
tokens (a handful a row). States are regions of a response; every special token has the region that it begins and the
regions that it may follow. What differs between families is in the tables, not in the walk; only messages with
channels (gpt-oss) have a walk of their own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.errors import BadInput
from aerie.settings.profile import Channels, Profile, Spelled, ToolGrammar


class Kind(IntEnum):
    """What a token id is to the grammar. Kinds above ``CONTINUED`` are events of the walk."""

    ORDINARY = 0
    WHITESPACE = 1
    CONTINUED = 2
    """Second and later tokens of a tag that is spelled by ordinary tokens."""
    OPEN = 3
    CLOSE = 4
    SECTION_BEGIN = 5
    CALL_BEGIN = 6
    ARGUMENT_BEGIN = 7
    KEY_BEGIN = 8
    KEY_END = 9
    VALUE_BEGIN = 10
    VALUE_END = 11
    CALL_END = 12
    SECTION_END = 13
    START = 14
    CHANNEL = 15
    CONSTRAIN = 16
    MESSAGE = 17
    MESSAGE_END = 18
    CALL = 19
    """End of the turn after a call, where messages have channels."""
    END = 20
    FOREIGN = 21
    OUT_OF_RANGE = 22


class Region(StrEnum):
    """A region of a response, which is also a state of the automaton."""

    BEFORE_OPEN = "before_open"
    REASONING = "reasoning"
    ANSWER = "answer"
    SECTION = "tool_section"
    CALL_ID = "tool_id"
    ARGUMENTS = "tool_arguments"
    KEY = "tool_key"
    AFTER_KEY = "tool_after_key"
    VALUE = "tool_value"
    AFTER_VALUE = "tool_after_value"
    AFTER_TOOLS = "after_tools"
    HEADER = "message_header"
    BETWEEN = "between_messages"
    ENDED = "after_end"


class PromptEnd(StrEnum):
    """How a prompt leaves reasoning: open, closed, for the model to open (``BARE``), or none of these."""

    OPEN = "open"
    CLOSED = "closed"
    BARE = "bare"
    NEITHER = "neither"


IN_CALL = frozenset({Region.CALL_ID, Region.ARGUMENTS, Region.KEY, Region.AFTER_KEY, Region.VALUE, Region.AFTER_VALUE})
IN_TOOLS = IN_CALL | {Region.SECTION}
TOOL_KINDS = frozenset(kind for kind in Kind if Kind.SECTION_BEGIN <= kind <= Kind.SECTION_END)
FRAME_KINDS = frozenset(kind for kind in Kind if Kind.START <= kind <= Kind.MESSAGE_END)
WHITE_SPACE_ONLY = frozenset({Region.SECTION, Region.AFTER_KEY, Region.AFTER_VALUE})
"""Regions between the tokens of tool calls, where no text belongs."""
TOOL_ENDS = frozenset({Kind.KEY_END, Kind.VALUE_END, Kind.CALL_END})
"""Tool tokens that end something and, outside of tools, nothing."""


@dataclass(frozen=True)
class ToolTables:
    """The automaton inside tools: the region that begins after a token, and the regions in which it is in its order.

    ``entry`` is the token with which tools begin. A family without tools has an empty one.
    """

    entry: Kind | None = None
    begins: Mapping[Kind, Region] = field(default_factory=dict)
    may_follow: Mapping[Kind, frozenset[Region]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChannelIds:
    """Ids of the texts in a message's header: the role, and the names of the channels."""

    role: tuple[int, ...]
    reasoning: tuple[int, ...]
    preamble: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled profile.

    ``kinds`` is uint8 [vocabulary_size], a ``Kind`` per token id. A prompt that leaves reasoning open ends with one of
    ``open_tails``, whose last tokens ``behind_open`` the template puts behind the tag; one with thinking off, with
    ``closed_tail``; one that leaves all to the response, with ``bare_tail`` (each empty where the family has none, or
    where its ids are not known). ``spelled`` are tags of ordinary tokens, the longest first; none are looked for where
    the family has such tags and not ``tags_known``. ``tool_form`` and ``tool_id_pattern`` say how a call reads as text;
    None without tools.
    """

    profile: str
    kinds: NDArray[np.uint8]
    opens_in: str
    open_tails: tuple[tuple[int, ...], ...]
    behind_open: tuple[int, ...]
    closed_tail: tuple[int, ...]
    bare_tail: tuple[int, ...]
    white_space_before_open: bool
    closed_by_tools: bool
    spelled: tuple[tuple[Kind, tuple[int, ...]], ...]
    tags_known: bool
    tools: ToolTables
    channels: ChannelIds | None
    tool_form: str | None
    tool_id_pattern: str | None

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return int(self.kinds.size)

    def classify(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Kind of every id in ``ids`` (int64 [n], any values) as uint8 [n], without regard to spelled tags."""
        # One comparison for both ends: a negative id is a huge unsigned one.
        outside = ids.view(np.uint64) >= self.kinds.size
        if not outside.any():
            return self.kinds[ids]
        kinds = self.kinds[np.where(outside, 0, ids)]
        kinds[outside] = Kind.OUT_OF_RANGE
        return kinds

    def classify_response(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """As ``classify``, with the first token of every spelled tag as the tag and its others as ``CONTINUED``."""
        kinds = self.classify(ids)
        for kind, tag in self.spelled:
            starts = np.flatnonzero(ids[: ids.size - len(tag) + 1] == tag[0]) if ids.size >= len(tag) else ()
            for start in starts:
                if tuple(ids[start : start + len(tag)].tolist()) == tag and kinds[start] <= Kind.WHITESPACE:
                    kinds[start] = kind
                    kinds[start + 1 : start + len(tag)] = Kind.CONTINUED
        return kinds

    def prompt_end(self, prompt: NDArray[np.int64], response: NDArray[np.int64]) -> PromptEnd:
        """How ``prompt`` leaves reasoning to ``response`` (int64 [n] both)."""
        if self.closed_tail and ends_with(prompt, self.closed_tail):
            return PromptEnd.CLOSED
        if any(ends_with(prompt, tail) for tail in self.open_tails):
            return PromptEnd.OPEN
        if self.behind_open and ends_with(prompt, self.open_tails[0][: -len(self.behind_open)]):
            # Reasoning is open; but where the response begins with the prompt's own end, it was cut off too early.
            return PromptEnd.NEITHER if response[:1].tolist() == [self.behind_open[0]] else PromptEnd.OPEN
        if self.opens_in != "prompt" and ends_with(prompt, self.bare_tail):
            return PromptEnd.BARE
        return PromptEnd.NEITHER


def ends_with(ids: NDArray[np.int64], tail: tuple[int, ...]) -> bool:
    """Whether ``ids`` ends with ``tail``."""
    return tuple(ids[ids.size - len(tail) :].tolist()) == tail if len(tail) <= ids.size else False


def compile_grammar(
    profile: Profile,
    token_ids: Mapping[str, int],
    vocabulary_size: int,
    *,
    whitespace_ids: Iterable[int] | None = None,
    text_ids: Mapping[str, tuple[int, ...]] | None = None,
) -> Grammar:
    """Compile ``profile`` for a verifier.

    Args:
        profile: the verifier's family.
        token_ids: the verifier's special and added tokens with their ids. Each that the profile gives no role in a
            response is foreign to one.
        vocabulary_size: number of ids that the verifier can produce.
        whitespace_ids: ids of tokens that are only white space; None takes those that the profile lists.
        text_ids: ids of the texts that the profile names; those that are missing are the profile's ``text_ids``.

    Raises:
        BadInput: a token of the profile is missing from ``token_ids``, has another id than the profile expects or an
            id outside the vocabulary, or has two roles; or a text that the grammar needs is missing from ``text_ids``.
    """
    if vocabulary_size < 1:
        raise BadInput(f"profile {profile.name}: vocabulary size {vocabulary_size}: expected at least 1")
    ids = _Ids(profile, token_ids, {**profile.text_ids, **(text_ids or {})}, vocabulary_size)
    reasoning, called = profile.reasoning, profile.channels or profile.tools
    return Grammar(
        profile=profile.name,
        kinds=_kinds(ids, profile.whitespace_ids if whitespace_ids is None else whitespace_ids),
        opens_in=reasoning.opens_in,
        open_tails=_open_tails(ids),
        behind_open=_behind_open(ids),
        closed_tail=ids.of_pieces(reasoning.closed_block),
        bare_tail=_bare_tail(ids),
        white_space_before_open=reasoning.white_space_before_open,
        closed_by_tools=reasoning.closed_by_tools,
        spelled=_spelled(ids),
        tags_known=all(ids.judges(tag) for tag in (reasoning.open, reasoning.close) if isinstance(tag, Spelled)),
        tools=_tool_tables(profile.tools) if profile.tools else ToolTables(),
        channels=_channel_ids(ids, profile.channels) if profile.channels else None,
        tool_form=_tool_form(profile),
        tool_id_pattern=called.id_pattern if called else None,
    )


def grammar_of_verifier(profile: Profile, tokens: VerifierTokens) -> Grammar:
    """Compile ``profile`` with everything known of a verifier's tokens; raises as ``compile_grammar``."""
    return compile_grammar(
        profile,
        tokens.token_ids,
        tokens.vocabulary_size,
        whitespace_ids=tokens.whitespace_ids,
        text_ids=tokens.text_ids,
    )


def grammar_of_profile(profile: Profile) -> Grammar:
    """Compile ``profile`` with the ids that it lists itself, where no checkpoint is at hand.

    Special tokens that the profile does not name are then ordinary ones to the grammar.

    Raises:
        BadInput: the profile does not fix its ids.
    """
    if profile.vocabulary_size is None:
        raise BadInput(
            f"profile {profile.name} does not fix its token ids: name the verifier's folder with --tokenizer"
        )
    known = {**profile.expected_ids, **profile.optional_ids}
    missing = [token for token in profile.special_tokens() if token not in known]
    if missing:
        raise BadInput(
            f"profile {profile.name} does not fix the ids of {', '.join(dict.fromkeys(missing))}: name the verifier's "
            "folder with --tokenizer"
        )
    return compile_grammar(profile, known, profile.vocabulary_size)


@dataclass(frozen=True)
class _Ids:
    """What a verifier's tokenizer says of the names in a profile."""

    profile: Profile
    tokens: Mapping[str, int]
    texts: Mapping[str, tuple[int, ...]]
    vocabulary_size: int

    def of_token(self, token: str) -> int:
        """Id of a special token."""
        if token not in self.tokens:
            raise BadInput(
                f"profile {self.profile.name}: the verifier has no special token {token!r}; "
                "choose the profile of its family, or prepare its data set again"
            )
        return self.inside(token, self.tokens[token])

    def of_pieces(self, pieces: Iterable[str]) -> tuple[int, ...]:
        """Ids of special tokens and texts, one after the other."""
        return tuple(i for piece in pieces for i in self._of_piece(piece))

    def knows(self, pieces: Iterable[str]) -> bool:
        """Whether the ids of all are known."""
        return all(piece in self.tokens or piece in self.texts for piece in pieces)

    def judges(self, tag: Spelled) -> bool:
        """Whether a spelled tag is looked for: not in a family that need not reason, where its ids are not known."""
        return self.profile.reasoning.opens_in != "never" or self.knows(tag.texts)

    def inside(self, token: str, token_id: int) -> int:
        """``token_id``, which must be in the vocabulary."""
        if not 0 <= token_id < self.vocabulary_size:
            last = self.vocabulary_size - 1
            raise BadInput(f"profile {self.profile.name}: {token!r} has id {token_id}, outside 0 to {last}")
        return token_id

    def _of_piece(self, piece: str) -> tuple[int, ...]:
        if piece in self.tokens:
            return (self.of_token(piece),)
        if piece not in self.texts:
            raise BadInput(
                f"profile {self.profile.name}: the ids of {piece!r} are not known: name the verifier's folder with "
                "--tokenizer, or prepare its data set again"
            )
        return tuple(self.inside(piece, token_id) for token_id in self.texts[piece])


def _kinds(ids: _Ids, whitespace_ids: Iterable[int]) -> NDArray[np.uint8]:
    profile = ids.profile
    _check_expected(profile, ids.tokens)
    kinds = np.zeros(ids.vocabulary_size, dtype=np.uint8)
    for token, token_id in ids.tokens.items():
        kinds[ids.inside(token, token_id)] = Kind.FOREIGN
    # After the added tokens: some tokenizers add runs of spaces, and a prompt's tail may name a newline.
    for token_id in whitespace_ids:
        kinds[ids.inside("a white-space token", token_id)] = Kind.WHITESPACE
    for token in profile.response_tokens_allowed:
        kinds[ids.of_token(token)] = Kind.ORDINARY
    taken: dict[int, str] = {}
    for token, kind in _roles(profile):
        token_id = ids.of_token(token)
        if token_id in taken:
            raise BadInput(f"profile {profile.name}: {token!r} and {taken[token_id]!r} are one id, {token_id}")
        taken[token_id] = token
        kinds[token_id] = kind
    return kinds


def _roles(profile: Profile) -> Iterator[tuple[str, Kind]]:
    for tag, kind in ((profile.reasoning.open, Kind.OPEN), (profile.reasoning.close, Kind.CLOSE)):
        if isinstance(tag, str):
            yield tag, kind
    tools, channels = profile.tools, profile.channels
    pairs = tools.pairs if tools else None
    named = (
        (tools, ("section_begin", "call_begin", "argument_begin", "call_end", "section_end")),
        (pairs, ("key_begin", "key_end", "value_begin", "value_end")),
        (channels, ("start", "channel", "constrain", "message", "message_end", "call")),
    )
    for group, names in named:
        for name in names if group else ():
            token = getattr(group, name)
            if token is not None:
                yield token, Kind[name.upper()]
    for token in profile.end_of_turn:
        if channels is None or token != channels.call:
            yield token, Kind.END


def _open_tails(ids: _Ids) -> tuple[tuple[int, ...], ...]:
    """Open tag, and what the generation prompt puts behind it (MiniMax: a newline)."""
    tag = ids.profile.reasoning.open
    if isinstance(tag, Spelled):
        return tuple(ids.of_pieces([text]) for text in tag.texts if ids.judges(tag))
    return ((ids.of_token(tag), *_behind_open(ids)),) if tag else ()


def _behind_open(ids: _Ids) -> tuple[int, ...]:
    """What the generation prompt puts behind the open tag."""
    tag, tail = ids.profile.reasoning.open, ids.profile.generation_prompt_tail
    return ids.of_pieces(tail[tail.index(tag) + 1 :]) if isinstance(tag, str) and tag in tail else ()


def _bare_tail(ids: _Ids) -> tuple[int, ...]:
    """What a prompt ends with that leaves all to the response; nothing is asked where its ids are not known."""
    tail = ids.profile.generation_prompt_tail
    if ids.profile.reasoning.opens_in == "prompt" or not ids.knows(tail):
        return ()
    return ids.of_pieces(tail)


def _spelled(ids: _Ids) -> tuple[tuple[Kind, tuple[int, ...]], ...]:
    reasoning = ids.profile.reasoning
    tags = [
        (kind, ids.of_pieces([text]))
        for tag, kind in ((reasoning.open, Kind.OPEN), (reasoning.close, Kind.CLOSE))
        if isinstance(tag, Spelled) and ids.judges(tag)
        for text in tag.texts
    ]
    return tuple(sorted(tags, key=lambda tag: len(tag[1]), reverse=True))


def _tool_tables(tools: ToolGrammar) -> ToolTables:
    begins = {Kind.CALL_BEGIN: Region.ARGUMENTS, Kind.CALL_END: Region.AFTER_TOOLS}
    may_follow = {
        Kind.CALL_BEGIN: frozenset({Region.ANSWER, Region.AFTER_TOOLS}),
        Kind.CALL_END: frozenset({Region.ARGUMENTS}),
    }
    if tools.section_begin:
        begins |= {Kind.SECTION_BEGIN: Region.SECTION, Kind.CALL_END: Region.SECTION}
        begins[Kind.SECTION_END] = Region.AFTER_TOOLS
        may_follow[Kind.SECTION_BEGIN] = frozenset({Region.ANSWER})
        may_follow |= dict.fromkeys((Kind.CALL_BEGIN, Kind.SECTION_END), frozenset({Region.SECTION}))
    if tools.argument_begin:
        begins |= {Kind.CALL_BEGIN: Region.CALL_ID, Kind.ARGUMENT_BEGIN: Region.ARGUMENTS}
        may_follow[Kind.ARGUMENT_BEGIN] = frozenset({Region.CALL_ID})
    if tools.pairs:
        begins |= {
            Kind.CALL_BEGIN: Region.CALL_ID,
            Kind.KEY_BEGIN: Region.KEY,
            Kind.KEY_END: Region.AFTER_KEY,
            Kind.VALUE_BEGIN: Region.VALUE,
            Kind.VALUE_END: Region.AFTER_VALUE,
        }
        may_follow |= dict.fromkeys((Kind.KEY_BEGIN, Kind.CALL_END), frozenset({Region.CALL_ID, Region.AFTER_VALUE}))
        may_follow[Kind.KEY_END] = frozenset({Region.KEY})
        may_follow[Kind.VALUE_BEGIN] = frozenset({Region.AFTER_KEY})
        may_follow[Kind.VALUE_END] = frozenset({Region.VALUE})
    return ToolTables(Kind.SECTION_BEGIN if tools.section_begin else Kind.CALL_BEGIN, begins, may_follow)


def _tool_form(profile: Profile) -> str | None:
    if profile.channels:
        return "json"
    return profile.tools.form if profile.tools else None


def _channel_ids(ids: _Ids, channels: Channels) -> ChannelIds:
    return ChannelIds(
        role=ids.of_pieces([channels.role]),
        reasoning=ids.of_pieces([channels.reasoning]),
        preamble=ids.of_pieces([channels.preamble]),
        answer=ids.of_pieces([channels.answer]),
    )


def _check_expected(profile: Profile, token_ids: Mapping[str, int]) -> None:
    expected = {**profile.expected_ids, **{t: i for t, i in profile.optional_ids.items() if t in token_ids}}
    for token, token_id in expected.items():
        found = token_ids.get(token)
        if found != token_id:
            raise BadInput(
                f"profile {profile.name}: {token!r} has id {found} in this verifier, expected {token_id}: "
                "the checkpoint is of another family or revision; choose the profile that fits it"
            )
