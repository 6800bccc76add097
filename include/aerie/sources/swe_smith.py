"""SWE-smith-trajectories: ``messages`` as JSON text, in three ways to write a call (splits tool, xml and ticks)."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aerie.sources.chat import standard_messages
from aerie.sources.conversation import Conversation, Unusable, declaration, own_id, text_field, well_formed
from aerie.sources.swe_agent import COMMAND

_TEXT = {"type": "string"}
TOOLS = (
    declaration(
        "bash",
        "Run a command in a shell",
        {"type": "object", "properties": {"command": _TEXT}, "required": ["command"]},
    ),
    declaration(
        "str_replace_editor",
        "View, create and edit files",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
                "path": _TEXT,
                "file_text": _TEXT,
                "old_str": _TEXT,
                "new_str": _TEXT,
                "insert_line": {"type": "integer"},
                "view_range": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["command", "path"],
        },
    ),
    declaration("submit", "Submit the work"),
)
_NAMES = {tool["function"]["name"] for tool in TOOLS}
# What follows in the system prompt lists the functions and how to write a call; the verifier's template has its own.
_FUNCTIONS = re.compile(r"\n\s*You have access to the following functions:.*\Z", re.DOTALL)
_FORMAT = re.compile(r"\n\s*(?:RESPONSE FORMAT:|Your response should always include).*\Z", re.DOTALL)
_CALL = re.compile(r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one trajectory; those of one ``instance_id`` are attempts at one task and share their split.

    The rows have no exit status; whether the task was ``resolved`` says what the authors filter by.

    Raises:
        Unusable: the task was not resolved, a field is missing or not JSON, a role is unknown, or nothing is left.
    """
    if row.get("resolved") is not True:
        raise Unusable("not_resolved", f"expected resolved true, found {row.get('resolved')!r}", by_rule=True)
    text = text_field(row, "messages")
    try:
        turns = json.loads(text, strict=False)
    except ValueError as error:
        raise Unusable("not_json", f"'messages': {error}") from error
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Unusable("missing_field", "expected a JSON list of turns in 'messages'")
    kept, notes = well_formed(standard_messages(list(_turns(turns)), _NAMES))
    return Conversation(own_id(row, "traj_id"), own_id(row, "instance_id"), kept, TOOLS, notes)


def _turns(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The turns with calls that stand in text made to ``tool_calls``, and what answers them to results."""
    awaits_result = False
    for turn in turns:
        role = turn.get("role")
        text = _plain(turn.get("content"))
        if role == "system":
            yield {"role": role, "content": _FORMAT.sub("", _FUNCTIONS.sub("", text))}
        elif role == "assistant":
            made = {**turn, "content": text} if turn.get("tool_calls") else _step(text)
            awaits_result = "tool_calls" in made
            yield made
        elif role == "user" and awaits_result:
            awaits_result = False
            yield {"role": "tool", "content": text}
        else:
            yield {**turn, "content": text}


def _plain(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _step(text: str) -> dict[str, Any]:
    if call := _CALL.search(text):
        arguments = {
            found["name"]: _value(found["name"], found["value"]) for found in _PARAMETER.finditer(call["body"])
        }
        return _assistant(text[: call.start()], call["name"].strip(), arguments)
    if command := COMMAND.match(text):
        name = "submit" if command["command"].strip() == "submit" else "bash"
        return _assistant(command["said"], name, {} if name == "submit" else {"command": command["command"]})
    return {"role": "assistant", "content": text}


def _assistant(said: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    call = {"function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": said.strip(), "tool_calls": [call]}


def _value(name: str, text: str) -> Any:
    """Value of a parameter written as text: numbers and lists by the editor's schema."""
    if name not in {"insert_line", "view_range"}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
