import json
from typing import Any

import pytest

from aerie.sources.conversation import Unusable, answer_positions
from aerie.sources.glaive import read

LEAD_IN = "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
WEATHER = {"name": "get_weather", "description": "Get it", "parameters": {"type": "object", "properties": {"city": {}}}}
EVENT = {"name": "add_event", "description": "Add it"}
TWO_FUNCTIONS = f"{LEAD_IN}{json.dumps(WEATHER, indent=4)}\n\n{json.dumps(EVENT)}\n"


def spoken(*turns: str) -> str:
    return "\n\n\n".join(turns)


def call(name: str, arguments: str) -> str:
    return f"""ASSISTANT: Let me see. <functioncall> {{"name": "{name}", "arguments": {arguments}}} <|endoftext|>"""


def as_text(messages: Any) -> str:
    return json.dumps(messages)


def test_declarations_back_to_back_become_tools_and_leave_no_text_behind() -> None:
    conversation = read({"system": TWO_FUNCTIONS, "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>"})

    assert [tool["function"]["name"] for tool in conversation.tools] == ["get_weather", "add_event"]
    assert conversation.tools[0] == {"type": "function", "function": WEATHER}
    assert conversation.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert "<|endoftext|>" not in as_text(conversation.messages)


def test_single_quoted_arguments_with_an_apostrophe_become_an_object() -> None:
    chat = spoken("USER: Add it", call("add_event", """'{"title": "Ann's day", "hour": 9}'"""))

    (made,) = read({"system": TWO_FUNCTIONS, "chat": chat}).messages[1]["tool_calls"]

    assert made["function"] == {"name": "add_event", "arguments": {"title": "Ann's day", "hour": 9}}


@pytest.mark.parametrize("arguments", ["""'{"city": "Rome"}'""", '{"city": "Rome"}', r'"{\"city\": \"Rome\"}"'])
def test_calls_and_responses_become_tool_messages_numbered_over_the_conversation(arguments: str) -> None:
    chat = spoken(
        "USER: Weather?",
        call("get_weather", arguments),
        'FUNCTION RESPONSE: {"sky": "blue"}',
        "ASSISTANT: Blue. <|endoftext|>",
        "USER: And again?",
        call("get_weather", arguments),
        'FUNCTION RESPONSE: {"sky": "grey"}',
        "ASSISTANT: Grey. <|endoftext|>",
    )

    messages = read({"system": TWO_FUNCTIONS, "chat": chat}).messages

    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"] * 2
    calls = [message["tool_calls"][0] for message in messages if "tool_calls" in message]
    assert [made["id"] for made in calls] == ["functions.get_weather:0", "functions.get_weather:1"]
    assert [made["function"]["arguments"] for made in calls] == [{"city": "Rome"}] * 2
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == [made["id"] for made in calls]
    assert messages[1]["content"] == "Let me see."
    assert messages[2]["content"] == '{"sky": "blue"}'
    assert not {"<functioncall>", "FUNCTION RESPONSE", "<|endoftext|>"} & set(as_text(messages).split())


@pytest.mark.parametrize(
    ("bad_turn", "note"),
    [
        (call("add_event", "'{broken'"), "cut:call_not_json"),
        (call("launch_rocket", "'{}'"), "cut:call_of_undeclared_function"),
        ("FUNCTION RESPONSE: {}", "cut:tool_result_without_call"),
    ],
)
def test_a_turn_that_cannot_be_expressed_cuts_the_conversation_but_not_what_came_before(
    bad_turn: str, note: str
) -> None:
    chat = spoken("USER: One", "ASSISTANT: Fine.", "USER: Two", bad_turn, "USER: Three", "ASSISTANT: Done.")

    conversation = read({"system": TWO_FUNCTIONS, "chat": chat})

    assert [message["content"] for message in conversation.messages] == ["One", "Fine.", "Two"]
    assert answer_positions(conversation.messages) == [1, 3]
    assert note in conversation.notes


def test_a_row_without_functions_keeps_its_system_prompt() -> None:
    row = {"system": "SYSTEM: You are a helpful assistant, with no access to external functions.\n", "chat": "USER: Hi"}

    conversation = read(row)

    assert conversation.tools == ()
    assert conversation.messages[0] == {
        "role": "system",
        "content": "You are a helpful assistant, with no access to external functions.",
    }


def test_a_chat_on_one_line_is_split_at_its_speakers() -> None:
    messages = read({"system": "", "chat": "USER: Hi there ASSISTANT: Hello <|endoftext|> USER: Bye"}).messages

    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "Hi there"),
        ("assistant", "Hello"),
        ("user", "Bye"),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"system": TWO_FUNCTIONS.rstrip()[:-3], "chat": "USER: Hi"}, "declaration_not_json"),
        ({"system": f"{LEAD_IN}{{}}", "chat": "USER: Hi"}, "declaration_not_json"),
        ({"system": "", "chat": " "}, "empty_conversation"),
        ({"system": "", "chat": "USER: \n\n\nASSISTANT: Hello"}, "empty_conversation"),
        ({"system": "", "chat": "Hi"}, "unknown_role"),
        ({"system": ""}, "missing_field"),
        ({"system": 3, "chat": "USER: Hi"}, "missing_field"),
    ],
)
def test_rows_that_cannot_be_used_say_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as refused:
        read(row)

    assert refused.value.reason == reason
