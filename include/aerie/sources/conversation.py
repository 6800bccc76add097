"""What a reader makes of a raw row, and the rules of a well-formed conversation that all readers share."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""A chat message as chat templates take it: ``role``, ``content``, and ``tool_calls`` or ``tool_call_id``."""

CUT = "cut"
"""Role of a message at which ``well_formed`` ends a conversation, for the reason in its ``content``."""


class Unusable(Exception):
    """A row that gives no conversation. It is counted under ``reason`` and never ends the job by itself.

    ``by_rule`` marks rows that a rule sets aside on purpose: they are not held against the source.
    """

    def __init__(self, reason: str, detail: str = "", *, by_rule: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.by_rule = by_rule


@dataclass(frozen=True)
class Conversation:
    """A conversation in the field's standard form.

    Messages alternate: an optional ``system``, then ``user``, ``assistant`` and ``tool`` as they came. Arguments of
    tool calls are objects, not JSON text. ``source_id`` is the row's own id, None where the source has none.
    ``conversation_id`` is what related rows share, None where only the content tells. ``notes`` name what was repaired.
    """

    source_id: str | None
    conversation_id: str | None
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def text_field(row: Mapping[str, Any], name: str) -> str:
    """Text of field ``name``, stripped.

    Raises:
        Unusable: the field is missing, is not text, or is empty.
    """
    value = row.get(name)
    if not isinstance(value, str):
        raise Unusable("missing_field", f"expected text in {name!r}, found {type(value).__name__}")
    if not value.strip():
        raise Unusable("empty_conversation", f"{name!r} is empty")
    return value.strip()


def list_field(row: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """List of objects in field ``name``.

    Raises:
        Unusable: the field is missing, holds something else, or is empty.
    """
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise Unusable("missing_field", f"expected a list of objects in {name!r}, found {type(value).__name__}")
    if not value:
        raise Unusable("empty_conversation", f"{name!r} is an empty list")
    return value


def own_id(row: Mapping[str, Any], name: str) -> str | None:
    """The row's own id, as text; None where it has none."""
    value = row.get(name)
    return str(value).strip() or None if isinstance(value, str | int) else None


def call_id(name: str, index: int) -> str:
    """Id of the conversation's call number ``index``, in the form that Kimi's template renders verbatim."""
    return f"functions.{name}:{index}"


def tool_call(name: str, arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One entry of an assistant message's ``tool_calls``."""
    return {"id": call_id(name, index), "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def declaration(name: object, description: object, parameters: object = None) -> dict[str, Any]:
    """One entry of ``tools``; a function without parameters gets an empty object schema.

    Raises:
        Unusable: the name or description is not text, or the parameters are not an object.
    """
    schema = parameters or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not isinstance(description or "", str) or not isinstance(schema, Mapping):
        raise Unusable(
            "declaration_not_json",
            f"expected a name, a description and an object of parameters, found {name!r}, {description!r}, "
            f"{parameters!r}"[:200],
        )
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": dict(schema)},
    }


_CLOSED_REASONING = re.compile(r"<think>.*?</think>|<\|begin_of_thought\|>.*?<\|end_of_thought\|>", re.DOTALL)
_OPEN_REASONING = re.compile(r"(?:<think>|<\|begin_of_thought\|>).*\Z", re.DOTALL)
_ENDED_REASONING = re.compile(r"\A.*(?:</think>|<\|end_of_thought\|>)", re.DOTALL)
_SOLUTION_MARKS = re.compile(r"<\|(?:begin|end)_of_solution\|>")


def without_reasoning(text: str) -> str:
    """An assistant's text without another model's reasoning: closed blocks, blocks cut short, and lone closing tags."""
    text = _CLOSED_REASONING.sub("", text)
    text = _ENDED_REASONING.sub("", text)
    text = _OPEN_REASONING.sub("", text)
    return _SOLUTION_MARKS.sub("", text).strip()


def well_formed(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Repair what can be repaired; return the messages and notes that name the repairs.

    Assistant turns lose their reasoning. Turns of the assistant before the first of the user are dropped; consecutive
    turns of the user, or of the assistant, are joined. At the first turn that cannot be repaired (empty, a late system
    message, a tool result without its call) the conversation is cut; what came before it is still good.

    Raises:
        Unusable: no turn of the user is left.
    """
    kept: list[Message] = []
    notes: list[str] = []
    for message in messages:
        cleaned = _cleaned(message)
        problem = _problem(kept, cleaned)
        if problem == "assistant_first":
            notes.append("dropped:assistant_first")
            continue
        if problem is not None:
            notes.append(f"cut:{problem}")
            break
        if _continues(kept, cleaned):
            notes.append(f"joined:{cleaned['role']}_twice")
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n\n{cleaned['content']}"}
        else:
            kept.append(cleaned)
    if not any(message["role"] == "user" for message in kept):
        raise Unusable("empty_conversation", "no turn of the user is left after cleaning")
    return tuple(kept), tuple(notes)


def _cleaned(message: Message) -> Message:
    text = message["content"].strip()
    return {**message, "content": without_reasoning(text) if message["role"] == "assistant" else text}


def _problem(kept: Sequence[Message], message: Message) -> str | None:
    """Why ``message`` cannot follow ``kept``, or None."""
    role = message["role"]
    if role == CUT:
        return str(message["content"])
    seen = {earlier["role"] for earlier in kept}
    if role == "assistant" and "user" not in seen:
        return "assistant_first"
    if role == "system" and seen - {"system"}:
        return "late_system"
    if role == "tool":
        return None if message["tool_call_id"] in _open_calls(kept) else "tool_result_without_call"
    if _open_calls(kept):
        return "call_without_result"
    return None if message["content"] or message.get("tool_calls") else "empty_turn"


def _open_calls(kept: Sequence[Message]) -> set[str]:
    """Ids of the calls at the end of ``kept`` that have no result yet."""
    answered: set[str] = set()
    for message in reversed(kept):
        if message["role"] != "tool":
            return {call["id"] for call in message.get("tool_calls", ())} - answered
        answered.add(message["tool_call_id"])
    return set()


def _continues(kept: Sequence[Message], message: Message) -> bool:
    """Whether ``message`` is more of the turn at the end of ``kept``."""
    if not kept or kept[-1]["role"] != message["role"] or message["role"] == "tool":
        return False
    return "tool_calls" not in kept[-1] and "tool_calls" not in message


def answer_positions(messages: Sequence[Message]) -> list[int]:
    """Where an answer is due: each ``i`` for which ``messages[:i]`` is the history of an assistant turn.

    A last turn of the user without an answer counts: the answer would be discarded anyway. Calls of which only some
    have a result wait for the others.
    """
    return [
        i
        for i in range(1, len(messages) + 1)
        if messages[i - 1]["role"] in {"user", "tool"}
        and (i == len(messages) or messages[i]["role"] == "assistant")
        and not _open_calls(messages[:i])
    ]
