"""Dumps of text: what they have lost.

A row of text (``messages``, the last one the assistant's, with ``content`` and ``reasoning_content`` or ``reasoning``)
has no token ids, so the boundary itself cannot be judged on it: every rule that needs ids is listed in ``unchecked``.
What can be seen is whether something is missing or stands in the wrong place.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.boundary.judge import FinishReason, finish_type
from aerie.boundary.rules import CORRUPT, FLAGS, RULES, Rule
from aerie.errors import BadInput
from aerie.settings.profile import Profile, Spelled

Encode = Callable[[str], Sequence[int]]

REASONING_FIELDS = ("reasoning_content", "reasoning")
SPARE_TOKENS = 8
"""What a response holds besides its text: tags and its end."""
SPARE_TOKENS_OF_CALL = 32
"""What a tool call holds besides its name and its arguments."""

TEXT_DUMP_RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "reasoning_lost",
            "corrupt",
            "The reasoning is empty, yet the server counted reasoning, or more tokens than the saved text can be: it "
            "was written, and the server's parser or the client dropped it.",
            "SpecForge#544, speculators PR#346",
        ),
        Rule(
            "tag_in_text",
            "corrupt",
            "A think tag stands inside the content or the reasoning: the text was split elsewhere, or not at all.",
            "sglang#24843",
        ),
        Rule(
            "special_token_in_text",
            "corrupt",
            "The text of another special token stands inside the content or the reasoning: a tool call that was not "
            "parsed, or what follows the end. Tokenising the text again makes a control token of it.",
            "vllm PR#28543, vllm PR#47616",
        ),
    )
}
"""Reasons that only text has."""

_DECIDED = ("empty_reasoning", "empty_answer", "aborted", "truncated_in_reasoning", "truncated_in_answer",
            "tool_arguments_not_json")  # fmt: skip
_NOT_OF_FILES = ("prompt_mismatch", "mask_mismatch", "mask_empty")
NEED_TOKEN_IDS = tuple(name for name in RULES if name not in (*_DECIDED, *_NOT_OF_FILES))
"""Rules that nothing can be said of without token ids."""

_NEED_FINISH_REASON = ("aborted", "truncated_in_reasoning", "truncated_in_answer")


@dataclass(frozen=True)
class TextVerdict:
    """What a row of text shows; token counts are None without a tokenizer."""

    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    unchecked: tuple[str, ...]
    reasoning_tokens: int | None
    answer_tokens: int | None
    tool_calls: int


@dataclass(frozen=True)
class _Answer:
    """The assistant's last message, and what the server said of it."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    completion_tokens: int | None
    reasoning_tokens: int | None
    finish: str | None


class TextJudge:
    """Looks at rows of text for a family; ``encode`` is the verifier's tokenizer, None where it is not at hand."""

    def __init__(self, profile: Profile, encode: Encode | None) -> None:
        self._reasons_at_all = profile.reasoning.opens_in != "never"
        self._tags = (*_texts(profile.reasoning.open), *_texts(profile.reasoning.close))
        ordinary = {*self._tags, *profile.response_tokens_allowed}
        self._special = tuple(token for token in dict.fromkeys(profile.special_tokens()) if token not in ordinary)
        self._encode = encode

    def judge(self, row: Mapping[str, Any], where: str) -> TextVerdict:
        """Judge one row.

        Raises:
            BadInput: the row is not of this shape.
        """
        answer = _answer_of(row, where)
        marks = set(self._marks(answer))
        names = (*RULES, *TEXT_DUMP_RULES)
        return TextVerdict(
            reasons=tuple(name for name in names if name in marks and (name in CORRUPT or name in TEXT_DUMP_RULES)),
            flags=tuple(name for name in names if name in marks and name in FLAGS),
            unchecked=(*NEED_TOKEN_IDS, *self._unchecked(answer)),
            reasoning_tokens=self._tokens(answer.reasoning),
            answer_tokens=self._tokens(answer.content),
            tool_calls=len(answer.calls),
        )

    def _marks(self, answer: _Answer) -> Iterator[str]:
        if answer.finish == "abort":
            yield "aborted"
        elif answer.finish == "length":
            yield "truncated_in_answer" if answer.content.strip() else "truncated_in_reasoning"
        elif not answer.content.strip() and not answer.calls:
            yield "empty_answer"
        if self._reasons_at_all and not answer.reasoning.strip():
            yield from self._marks_without_reasoning(answer)
        if _holds(answer, self._tags):
            yield "tag_in_text"
        if _holds(answer, self._special):
            yield "special_token_in_text"
        if any(not _is_json(arguments) for _, arguments in answer.calls):
            yield "tool_arguments_not_json"

    def _marks_without_reasoning(self, answer: _Answer) -> Iterator[str]:
        if answer.reasoning_tokens or (
            answer.completion_tokens is not None and answer.completion_tokens > self._most_tokens(answer)
        ):
            yield "reasoning_lost"
        elif not _holds(answer, self._tags) and (self._encode is None or answer.completion_tokens is None):
            # With a count that the text explains, thinking was off and nothing is lost.
            yield "empty_reasoning"

    def _most_tokens(self, answer: _Answer) -> int:
        """The most tokens that what was saved can have been: by the tokenizer, else one for each byte."""
        texts = (answer.content, *(text for call in answer.calls for text in call))
        tokens = (self._tokens(text) if self._encode else len(text.encode(errors="replace")) for text in texts)
        return sum(filter(None, tokens)) + SPARE_TOKENS + SPARE_TOKENS_OF_CALL * len(answer.calls)

    def _tokens(self, text: str) -> int | None:
        return len(self._encode(text)) if self._encode else None

    def _unchecked(self, answer: _Answer) -> Iterator[str]:
        if answer.finish is None:
            yield from _NEED_FINISH_REASON
        if self._reasons_at_all and answer.completion_tokens is None and answer.reasoning_tokens is None:
            yield "reasoning_lost"


def is_text_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is a dump of text: it has messages and no token ids."""
    return row.get("messages") is not None and row.get("output_ids") is None


def _texts(tag: str | Spelled | None) -> Sequence[str]:
    """How a tag reads."""
    if tag is None:
        return ()
    return (tag,) if isinstance(tag, str) else tag.texts


def _holds(answer: _Answer, tokens: Sequence[str]) -> bool:
    return any(token in answer.content or token in answer.reasoning for token in tokens)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# Reading a row


def _answer_of(row: Mapping[str, Any], where: str) -> _Answer:
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise BadInput(f"{where}: expected messages to be a list of objects with role and content")
    message = messages[-1] if messages else {}
    if message.get("role") != "assistant":
        raise BadInput(
            f"{where}: expected the last of messages to be the assistant's, found role {message.get('role')!r}"
        )
    usage = _object(row.get("usage"), "usage", where)
    details = _object(usage.get("completion_tokens_details"), "usage.completion_tokens_details", where)
    return _Answer(
        content=_text(message.get("content"), "content", where),
        reasoning=next(filter(None, (_text(message.get(name), name, where) for name in REASONING_FIELDS)), ""),
        calls=tuple(_call(call, where) for call in _list(message.get("tool_calls"), "tool_calls", where)),
        completion_tokens=_count(usage, "completion_tokens", where) or _count(row, "completion_tokens", where),
        reasoning_tokens=_count(details, "reasoning_tokens", where) or _count(usage, "reasoning_tokens", where),
        finish=finish_of(row.get("finish_reason"), where),
    )


def finish_of(reason: Any, where: str) -> str | None:
    """The type of a finish reason; an OpenAI server says ``tool_calls`` where the model stopped after a call.

    Raises:
        BadInput: it is another.
    """
    if reason in ("tool_calls", "function_call"):
        return "stop"
    if not isinstance(reason, str | Mapping | None):
        raise BadInput(f"{where}: finish reason {str(reason)[:80]!r}: expected a string, or SGLang's object")
    known: FinishReason = reason
    try:
        return finish_type(known)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error


def _text(value: Any, name: str, where: str) -> str:
    """A text, or the parts of one."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        return "".join(_text(part.get("text"), name, where) for part in value)
    raise BadInput(f"{where}: expected {name} to be a string, found {type(value).__name__}")


def _call(call: Any, where: str) -> tuple[str, str]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadInput(f"{where}: expected each of tool_calls to be an object with function.name")
    arguments = function.get("arguments")
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)


def _object(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise BadInput(f"{where}: expected {name} to be an object, found {type(value).__name__}")
    return value or {}


def _list(value: Any, name: str, where: str) -> Sequence[Any]:
    if value is not None and not isinstance(value, list):
        raise BadInput(f"{where}: expected {name} to be a list, found {type(value).__name__}")
    return value or []


def _count(values: Mapping[str, Any], name: str, where: str) -> int | None:
    value = values.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise BadInput(f"{where}: expected {name} to be an integer of at least 0, found {value!r:.80}")
    return value
