"""No row, whatever it holds, ends a job: each reader makes a conversation of it or says why it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.settings.pipeline import GENERIC, SourceSettings
from aerie.sources.conversation import Unusable, answer_positions
from aerie.sources.readers import READERS, reader_of

TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "USER: a ASSISTANT: <functioncall> {} FUNCTION RESPONSE: {",
        'SYSTEM: {"name": "f", "parameters": 3} ,{"name": 1}',
        "<think>",
        "```\nls\n```",
        "<function=bash>\n<parameter=insert_line>x</parameter></function>",
        "[]",
        "[3]",
        "{}",
        '[{"role": "user", "content": 1}]',
        "user",
        "assistant",
        "ai",
        "tool",
        "submitted",
    ]
)
NAMES = ("content", "value", "text", "system_prompt")
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "human", "gpt", "ai", "other"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "function", "text"]), inner),
    max_leaves=4,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.just("f") | VALUES}, optional={"arguments": VALUES, "parameters": VALUES, "description": VALUES}
)
CALLS = st.lists(FUNCTIONS | st.fixed_dictionaries({"function": FUNCTIONS | VALUES}) | VALUES, max_size=2)
CONTENT = TEXTS | st.integers(1, 9) | VALUES
TURNS = st.builds(
    lambda role, content, fields: {"role": role, "from": role, **dict.fromkeys(NAMES, content), **fields},
    ROLES,
    CONTENT,
    st.fixed_dictionaries({}, optional={"tool_calls": CALLS, "tool_call_id": VALUES, "tool_call_ids": VALUES}),
)
CONVERSATIONS = st.lists(TURNS, max_size=4)
CHATS = CONVERSATIONS | CONVERSATIONS.map(json.dumps) | st.lists(TURNS | VALUES, max_size=3) | VALUES
ROWS = st.fixed_dictionaries(
    dict.fromkeys(("messages", "conversations", "trajectory"), CHATS),
    optional={
        **dict.fromkeys(("prompt", "instruction", "input", "problem", "system", "chat", "id"), VALUES),
        "tools": CALLS | VALUES,
    },
)


@pytest.mark.parametrize("name", [*READERS, GENERIC])
@settings(max_examples=50)
@given(row=ROWS)
def test_any_row_is_read_or_refused_with_a_reason(name: str, row: dict[str, Any]) -> None:
    finished = row | {"exit_status": "submitted", "resolved": True}
    try:
        conversation = reader_of(SourceSettings(reader=name, path=Path("x"), licence="MIT"))(finished)
    except Unusable as problem:
        assert problem.reason
        return
    assert answer_positions(conversation.messages)
    json.dumps([conversation.messages, conversation.tools])
    assert all(isinstance(message["content"], str) for message in conversation.messages)
    assert all(name is None or isinstance(name, str) for name in (conversation.source_id, conversation.conversation_id))
