"""glaive-function-calling-v2: ``system`` and ``chat``, both plain text, with calls and results inside the text."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aerie.sources.conversation import (
    Conversation,
    Message,
    Unusable,
    call_id,
    declaration,
    text_field,
    tool_call,
    well_formed,
)

_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_NAMES = "|".join(_ROLES)
# Speakers stand at the start of a line or after the end mark; only a chat on one line has them between words.
_SPEAKER = re.compile(rf"(?:\A|\n|<\|endoftext\|>)[ \t]*({_NAMES}):")
_SPEAKER_INLINE = re.compile(rf"(?:\A|\s)({_NAMES}):")
_END_MARK = "<|endoftext|>"
_CALL_MARK = "<functioncall>"
_QUOTED_ARGUMENTS = re.compile(r"""["']arguments["']\s*:\s*'(?P<json>.*)'\s*\}\s*\Z""", re.DOTALL)
_NAME = re.compile(r"""["']name["']\s*:\s*["'](?P<name>[\w.-]+)["']""")
_LEAD_IN = re.compile(r"(?:You are a helpful assistant )?with access to the following functions\b.{0,60}\Z", re.DOTALL)


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one row of the source.

    Raises:
        Unusable: a field is missing, a declaration is not JSON, or nothing is left.
    """
    system, tools = _system(row.get("system"))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    notes: list[str] = []
    try:
        for message in _turns(text_field(row, "chat"), {tool["function"]["name"] for tool in tools}):
            messages.append(message)
    except _Cut as cut:
        notes.append(f"cut:{cut}")
    kept, repairs = well_formed(messages)
    return Conversation(None, None, kept, tools, (*notes, *repairs))


class _Cut(Exception):
    """The turn cannot be expressed as messages; those before it can."""


def _system(text: object) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Split the system text into what is said and the functions declared after it, back to back."""
    if text is None:
        return "", ()
    if not isinstance(text, str):
        raise Unusable("missing_field", f"expected text in 'system', found {type(text).__name__}")
    said, brace, rest = text.strip().removeprefix("SYSTEM:").partition("{")
    tools = tuple(_declarations(brace + rest))
    # The sentence that leads to the declarations goes with them: the verifier's template has its own.
    return (_LEAD_IN.sub("", said) if tools else said).strip(), tools


def _declarations(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(strict=False)
    position = 0
    while position < len(text):
        try:
            function, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise Unusable("declaration_not_json", str(error)) from error
        if not isinstance(function, dict):
            raise Unusable("declaration_not_json", f"expected an object, found {json.dumps(function)[:80]}")
        yield declaration(function.get("name"), function.get("description"), function.get("parameters"))
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1


def _turns(chat: str, declared: set[str]) -> Iterator[Message]:
    calls: list[str] = []
    for role, text in _spoken(chat):
        if role == "tool":
            if not calls:
                raise _Cut("tool_result_without_call")
            yield {"role": "tool", "tool_call_id": calls[-1], "content": text}
        elif role == "assistant" and _CALL_MARK in text:
            said, _, call = text.partition(_CALL_MARK)
            name, arguments = _call(call.strip())
            if name not in declared:
                raise _Cut("call_of_undeclared_function")
            calls.append(call_id(name, len(calls)))
            made = tool_call(name, arguments, len(calls) - 1)
            yield {"role": "assistant", "content": said.strip(), "tool_calls": [made]}
        else:
            yield {"role": role, "content": text}


def _spoken(chat: str) -> Iterator[tuple[str, str]]:
    speaker = _SPEAKER if "ASSISTANT" in _SPEAKER.findall(chat) else _SPEAKER_INLINE
    before, *parts = speaker.split(chat)
    if before.strip() or not parts:
        raise Unusable("unknown_role", f"expected the chat to start with USER:, found {chat[:40]!r}")
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        yield _ROLES[name], text.replace(_END_MARK, "").strip()


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call such as ``{"name": "f", "arguments": '{"x": 1}'}``."""
    call = _json_object(text)
    if call is None:
        name, quoted = _NAME.search(text), _QUOTED_ARGUMENTS.search(text)
        if name is None or quoted is None:
            raise _Cut("call_not_json")
        call = {"name": name["name"], "arguments": quoted["json"].replace("\\'", "'")}
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json_object(arguments)
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise _Cut("call_not_json")
    return call["name"], arguments


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, strict=False)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
