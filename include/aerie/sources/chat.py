"""The shapes in which most sources keep a chat: ``{role, content}`` with tool calls, and ``{from, value}``."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from aerie.sources.conversation import CUT, Message, Unusable, call_id, declaration, tool_call

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
}
STANDARD_ROLES = ROLES | {
    "developer": "system",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def messages_of(turns: Iterable[Mapping[str, Any]], role: str = "role", content: str = "content") -> Sequence[Message]:
    """Messages of a list of turns, with the field's standard role names.

    Raises:
        Unusable: a role is unknown, or a turn's content is not text.
    """
    return [{"role": _role(turn.get(role), ROLES), "content": _text(turn.get(content))} for turn in turns]


def shared_messages(turns: Iterable[Mapping[str, Any]]) -> Sequence[Message]:
    """Messages of ``[{from, value}]``, the shape that ShareGPT made common; raises as ``messages_of`` does."""
    return messages_of(turns, role="from", content="value")


def standard_messages(
    turns: Sequence[Any],
    declared: Collection[str],
    *,
    role: str | None = None,
    content: str | None = None,
    roles: Mapping[str, str] | None = None,
) -> list[Message]:
    """Messages of turns that may hold tool calls and results in the form of chat-completion APIs.

    Calls get ids ``functions.NAME:IDX``, counted through the conversation; results follow their call's id, or are of
    the calls before them in order. A call that cannot be expressed, or whose function is not ``declared``, ends the
    conversation there (role ``CUT``). ``roles`` adds names of roles to the usual ones.

    Raises:
        Unusable: a turn is not an object, a role is unknown, or a content is not text.
    """
    names = STANDARD_ROLES | {name.lower(): meant for name, meant in (roles or {}).items()}
    calls = _Calls(declared)
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise Unusable("missing_field", f"expected turns to be objects, found {type(turn).__name__}")
        who = _role(turn.get(role or ("role" if "role" in turn else "from")), names)
        text = _text(turn.get(content or ("content" if "content" in turn else "value")))
        if who == "tool":
            messages.append({"role": who, "tool_call_id": calls.answered(turn), "content": text})
        elif who == "assistant" and turn.get("tool_calls"):
            messages.append(calls.made(turn["tool_calls"], text))
        else:
            messages.append({"role": who, "content": text})
    return messages


class _Calls:
    """The tool calls of a conversation so far: their ids in the source, and ours."""

    def __init__(self, declared: Collection[str]) -> None:
        self._declared = declared
        self._count = 0
        self._open: list[tuple[str | None, str]] = []

    def made(self, calls: Any, text: str) -> Message:
        """The message of an assistant that calls functions, or one that cuts the conversation."""
        made = []
        self._open = []
        for call in calls if isinstance(calls, list) else [calls]:
            name, arguments = _called(call)
            if not isinstance(name, str) or arguments is None:
                return {"role": CUT, "content": "call_not_json"}
            if name not in self._declared:
                return {"role": CUT, "content": "call_of_undeclared_function"}
            self._open.append((call.get("id"), call_id(name, self._count)))
            made.append(tool_call(name, arguments, self._count))
            self._count += 1
        return {"role": "assistant", "content": text, "tool_calls": made}

    def answered(self, turn: Mapping[str, Any]) -> str:
        """Our id of the call that a result is of; an empty one, which no call has, where there is none."""
        several = turn.get("tool_call_ids")
        theirs = turn.get("tool_call_id") or (several[0] if isinstance(several, list) and several else None)
        for entry in self._open:
            if theirs is None or entry[0] in (None, theirs):
                self._open.remove(entry)
                return entry[1]
        return ""


def _called(call: object) -> tuple[object, Mapping[str, Any] | None]:
    """Name and arguments of a call, None where it is not one."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return (
        (function.get("name"), _arguments(function.get("arguments"))) if isinstance(function, Mapping) else (None, None)
    )


def _arguments(value: object) -> Mapping[str, Any] | None:
    """Arguments of a call, given as an object or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}", strict=False)
        except ValueError:
            return None
    return value if isinstance(value, Mapping) else {} if value is None else None


def declarations(value: object) -> tuple[dict[str, Any], ...]:
    """Declarations of functions, given with or without their ``{"type": "function"}`` wrapping, or each as JSON text.

    Raises:
        Unusable: something else.
    """
    items = [] if value in (None, "") else value
    if not isinstance(items, list):
        raise Unusable("declaration_not_json", f"expected a list of declarations, found {type(value).__name__}")
    return tuple(map(_declaration, items))


def _declaration(item: object) -> dict[str, Any]:
    if isinstance(item, str):
        try:
            item = json.loads(item, strict=False)
        except ValueError as error:
            raise Unusable("declaration_not_json", str(error)) from error
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unusable("declaration_not_json", f"expected an object, found {json.dumps(item)[:80]}")
    return declaration(function.get("name"), function.get("description"), function.get("parameters"))


def _role(name: object, names: Mapping[str, str]) -> str:
    known = names.get(name.strip().lower()) if isinstance(name, str) else None
    if known is None:
        raise Unusable("unknown_role", f"expected one of {', '.join(names)}, found {name!r}")
    return known


def _text(value: object) -> str:
    """Text of a turn; of a list of parts, all of them text, as chat-completion APIs have it, the parts together."""
    if value is None:
        return ""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise Unusable("missing_field", f"expected text in a turn, found {type(value).__name__}")
    return value
