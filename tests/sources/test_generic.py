import json
from pathlib import Path
from typing import Any

import pytest

from aerie.settings.pipeline import SourceSettings
from aerie.sources.conversation import Conversation, Unusable
from aerie.sources.readers import reader_of

ASK = [{"role": "user", "content": "Add 1 and 2."}]
TALK = [*ASK, {"role": "assistant", "content": "<think>hm</think>3"}, {"role": "user", "content": "And 4?"}]
WEATHER = {"name": "weather", "description": "Of a town", "parameters": {"type": "object", "properties": {}}}


def read(row: dict[str, Any], **columns: Any) -> Conversation:
    source = SourceSettings(reader="generic", path=Path("x"), licence="MIT", columns=columns)
    return reader_of(source)(row)


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"messages": ASK}, {}, [("user", "Add 1 and 2.")]),
        ({"messages": json.dumps(ASK)}, {}, [("user", "Add 1 and 2.")]),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, {}, [("user", "Hi")]),
        ({"prompt": "[1, 2] + [3] = ?"}, {}, [("user", "[1, 2] + [3] = ?")]),
        ({"prompt": ASK}, {}, [("user", "Add 1 and 2.")]),
        ({"instruction": "Sort.", "input": "3 2", "output": "2 3"}, {}, [("user", "Sort.\n\n3 2")]),
        ({"instruction": "Sort.", "input": ""}, {}, [("user", "Sort.")]),
        ({"task": "Sort.", "data": "3 2"}, {"prompt": ("task", "data")}, [("user", "Sort.\n\n3 2")]),
        ({"q": "Sort.", "prompt": "no"}, {"prompt": "q"}, [("user", "Sort.")]),
        ({"prompt": "Sort.", "system": "Use <a>"}, {}, [("user", "Sort.")]),
        ({"prompt": "Sort.", "sys": "Be brief"}, {"system": "sys"}, [("system", "Be brief"), ("user", "Sort.")]),
        ({"prompt": "Sort.", "sys": None}, {"system": "sys"}, [("user", "Sort.")]),
        (
            {"dialogue": [{"speaker": "Customer", "text": "Hi"}, {"speaker": "agent", "text": "Hello"}]},
            {
                "messages": "dialogue",
                "role": "speaker",
                "content": "text",
                "roles": {"customer": "user", "agent": "assistant"},
            },
            [("user", "Hi"), ("assistant", "Hello")],
        ),
        ({"messages": TALK}, {}, [("user", "Add 1 and 2."), ("assistant", "3"), ("user", "And 4?")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            {},
            [("user", "ab")],
        ),
    ],
)
def test_columns_are_taken_by_their_usual_names_or_as_mapped(
    row: dict[str, Any], columns: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert said(read(row, **columns)) == expected


def test_ids_are_the_rows_own_and_only_text_or_integers() -> None:
    assert read({"id": 7, "prompt": "a"}).source_id == "7"
    assert read({"id": 7, "n": "x", "prompt": "a"}, id="n").source_id == "x"
    assert read({"thread": "t", "prompt": "a"}, conversation_id="thread").conversation_id == "t"
    assert read({"id": None, "prompt": "a"}).source_id is None


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_and_calls_in_the_form_of_chat_apis_get_the_verifiers_ids(wrapped: bool, as_text: bool) -> None:
    """An id such as ``call_...`` in the history changes what Kimi does next."""
    tools: Any = [{"type": "function", "function": WEATHER} if wrapped else WEATHER]
    call = {"function": {"name": "weather", "arguments": '{"town": "Ulm"}' if as_text else {"town": "Ulm"}}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call | {"id": "call_b"}, call | {"id": "call_a"}]},
        {"role": "tool", "tool_call_id": "call_a", "content": "dry"},
        {"role": "tool", "tool_call_id": "call_b", "content": "wet"},
        {"role": "assistant", "content": "Both.", "tool_calls": None},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": "call_c"}]},
        {"role": "tool", "content": "dry"},
    ]

    conversation = read({"messages": messages, "tools": json.dumps(tools) if as_text else tools})

    made = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    assert [call["id"] for call in made] == [f"functions.weather:{i}" for i in range(3)]
    assert all(call["function"]["arguments"] == {"town": "Ulm"} for call in made)
    assert [message["tool_call_id"] for message in conversation.messages if message["role"] == "tool"] == [
        "functions.weather:1",
        "functions.weather:0",
        "functions.weather:2",
    ]
    assert conversation.tools[0]["function"] == WEATHER
    assert conversation.notes == ()


@pytest.mark.parametrize(
    ("call", "note"),
    [
        ({"function": {"name": "other", "arguments": "{}"}}, "cut:call_of_undeclared_function"),
        ({"function": {"name": "weather", "arguments": "{town"}}, "cut:call_not_json"),
        ("weather", "cut:call_not_json"),
    ],
)
def test_a_call_that_cannot_be_rendered_ends_the_conversation_before_it(call: Any, note: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "dry"}]

    conversation = read({"messages": messages, "tools": [WEATHER]})

    assert said(conversation) == [("user", "Add 1 and 2.")]
    assert conversation.notes == (note,)


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        ({"text": "a"}, {}, "missing_field"),
        ({"prompt": 3}, {}, "missing_field"),
        ({"messages": "a"}, {}, "missing_field"),
        ({"messages": ["a"]}, {}, "missing_field"),
        ({"prompt": "a"}, {"prompt": "question"}, "missing_field"),
        ({"prompt": "a"}, {"id": "key"}, "missing_field"),
        ({"prompt": "a"}, {"system": "persona"}, "missing_field"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, {}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "missing_field"),
        ({"messages": []}, {}, "empty_conversation"),
        ({"prompt": " "}, {}, "empty_conversation"),
        ({"prompt": "a", "tools": "{not json"}, {}, "declaration_not_json"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, {}, "declaration_not_json"),
    ],
)
def test_a_row_that_does_not_fit_its_mapping_says_why(
    row: dict[str, Any], columns: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unusable) as refused:
        read(row, **columns)

    assert refused.value.reason == reason
