"""The two shapes in which most sources keep a chat: ``{role, content}`` and ``{from, value}``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aerie.sources.conversation import Message, Unusable

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


def messages_of(turns: Iterable[Mapping[str, Any]], role: str = "role", content: str = "content") -> Sequence[Message]:
    """Messages of a list of turns, with the field's standard role names.

    Raises:
        Unusable: a role is unknown, or a turn's content is not text.
    """
    return [{"role": _role(turn.get(role)), "content": _text(turn.get(content))} for turn in turns]


def shared_messages(turns: Iterable[Mapping[str, Any]]) -> Sequence[Message]:
    """Messages of ``[{from, value}]``, the shape that ShareGPT made common; raises as ``messages_of`` does."""
    return messages_of(turns, role="from", content="value")


def _role(name: object) -> str:
    known = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if known is None:
        raise Unusable("unknown_role", f"expected one of {', '.join(ROLES)}, found {name!r}")
    return known


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Unusable("missing_field", f"expected text in a turn, found {type(value).__name__}")
    return value
