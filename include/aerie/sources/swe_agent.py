"""SWE-agent trajectories: ``trajectory`` turns in which a command stands in a code block after its discussion."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from aerie.sources.conversation import (
    Conversation,
    Message,
    Unusable,
    call_id,
    declaration,
    list_field,
    own_id,
    text_field,
    tool_call,
    well_formed,
)

FINISHED = "submitted"
SHELL = "bash"
TOOLS = (
    declaration(
        SHELL,
        "Run a command",
        {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command"}},
            "required": ["command"],
        },
    ),
)
# From here on the system prompt tells how to put a command into text; the verifier's own tool format takes its place.
_RESPONSE_FORMAT = re.compile(r"\n\s*RESPONSE FORMAT:.*\Z", re.DOTALL)
# The last code block is the command: that is how SWE-agent itself reads a step.
COMMAND = re.compile(r"\A(?P<said>.*)^```[^\n`]*\n(?P<command>.*?)\n?^```[ \t]*$", re.DOTALL | re.MULTILINE)
_DISCUSSION = re.compile(r"\A\s*DISCUSSION\s*\n")


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one trajectory; those of one ``instance_id`` are attempts at one task and share their split.

    Raises:
        Unusable: the agent did not finish, a field is missing, a role is unknown, or nothing is left.
    """
    status = text_field(row, "exit_status")
    if status != FINISHED:
        raise Unusable("exit_status", f"expected exit_status {FINISHED!r}, found {status!r}", by_rule=True)
    kept, notes = well_formed(list(_messages(list_field(row, "trajectory"))))
    return Conversation(None, own_id(row, "instance_id"), kept, TOOLS, notes)


def _messages(turns: list[Mapping[str, Any]]) -> Iterator[Message]:
    calls = 0
    awaits_result = False
    for turn in turns:
        role, text = turn.get("role"), turn.get("text") or turn.get("system_prompt") or ""
        if not isinstance(text, str):
            raise Unusable("missing_field", f"expected text in a turn, found {type(text).__name__}")
        if role == "system":
            yield {"role": "system", "content": _RESPONSE_FORMAT.sub("", text)}
        elif role == "user" and awaits_result:
            yield {"role": "tool", "tool_call_id": call_id(SHELL, calls - 1), "content": text}
            awaits_result = False
        elif role == "user":
            yield {"role": "user", "content": text}
        elif role == "ai":
            step = COMMAND.match(text)
            awaits_result = step is not None
            yield _step(step, calls) if step else {"role": "assistant", "content": text}
            calls += awaits_result
        else:
            raise Unusable("unknown_role", f"expected system, user or ai, found {role!r}")


def _step(step: re.Match[str], index: int) -> Message:
    said = _DISCUSSION.sub("", step["said"]).strip()
    return {
        "role": "assistant",
        "content": said,
        "tool_calls": [tool_call(SHELL, {"command": step["command"]}, index)],
    }
