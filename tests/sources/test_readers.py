import json
from pathlib import Path
from typing import Any

import pytest

from aerie.errors import BadInput
from aerie.settings.pipeline import SourceSettings
from aerie.sources import (
    glaive,
    magicoder,
    mixture_of_thoughts,
    opencodeinstruct,
    openthoughts,
    sharegpt,
    swe_agent,
    swe_smith,
    ultrachat,
)
from aerie.sources.conversation import Unusable, answer_positions, well_formed, without_reasoning
from aerie.sources.readers import reader_of


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in pairs]


def contents(conversation: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>\nI wonder.\n</think>\n\nSix.", "Six."),
        ("<think>a</think>One.<think>b</think> Two.", "One. Two."),
        ("Half a thought that opened in the prompt</think>Six.", "Six."),
        ("<think>cut by a length limit", ""),
        ("<|begin_of_thought|>I wonder.<|end_of_thought|><|begin_of_solution|>Six.<|end_of_solution|>", "Six."),
        ("No reasoning at all", "No reasoning at all"),
    ],
)
def test_another_models_reasoning_never_stays_in_history(text: str, kept: str) -> None:
    assert without_reasoning(text) == kept


def test_opencodeinstruct_takes_the_request_and_the_sources_own_id() -> None:
    conversation = opencodeinstruct.read(
        {"id": "a1", "input": " Sort. ", "output": "sorted(x)", "average_test_score": "1"}
    )

    assert conversation.source_id == "a1"
    assert contents(conversation) == [("user", "Sort.")]


@pytest.mark.parametrize(
    "row", [{"instruction": "Sort.", "response": "x"}, {"problem": "Sort.", "solution": "x", "seed": "y", "index": 4}]
)
def test_magicoder_reads_both_of_its_shapes(row: dict[str, Any]) -> None:
    assert contents(magicoder.read(row)) == [("user", "Sort.")]


def test_mixture_of_thoughts_takes_turns_of_the_user_only() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "<think>Hm.</think>4"},
            {"role": "user", "content": "Sure?"},
        ]
    }

    assert contents(mixture_of_thoughts.read(row)) == [("user", "2+2?")]


def test_openthoughts_drops_the_system_prompt_that_forces_a_format() -> None:
    row = {
        "system": "Use <|begin_of_thought|> and <|end_of_thought|>.",
        "conversations": turns(
            ("user", "2+2?"), ("assistant", "<|begin_of_thought|>Hm.<|end_of_thought|>4"), ("user", "Sure?")
        ),
    }

    assert contents(openthoughts.read(row)) == [("user", "2+2?"), ("assistant", "4"), ("user", "Sure?")]


def test_ultrachat_does_not_repeat_its_first_turn() -> None:
    row = {
        "prompt": "Hi",
        "prompt_id": "abc",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
    }

    conversation = ultrachat.read(row)

    assert conversation.source_id == "abc"
    assert contents(conversation) == [("user", "Hi"), ("assistant", "Hello")]


def test_sharegpt_drops_a_first_answer_and_joins_two_questions() -> None:
    row = {"id": "x_3", "conversations": turns(("gpt", "Hello!"), ("human", "Hi"), ("human", "2+2?"), ("gpt", "4"))}

    conversation = sharegpt.read(row)

    assert contents(conversation) == [("user", "Hi\n\n2+2?"), ("assistant", "4")]
    assert set(conversation.notes) == {"dropped:assistant_first", "joined:user_twice"}


def test_parts_of_one_shared_page_are_one_conversation_so_that_no_split_tears_them_apart() -> None:
    parts = [sharegpt.read({"id": f"QWJhYvA_{i}", "conversations": turns(("human", "Hi"))}) for i in (0, 17)]

    assert {part.conversation_id for part in parts} == {"QWJhYvA"}
    assert {part.source_id for part in parts} == {"QWJhYvA_0", "QWJhYvA_17"}


def test_sharegpt_turns_a_copied_page_into_text_with_its_code() -> None:
    page = (
        '<div class="markdown prose"><p>Use &lt;b&gt; like <code>this</code>:</p><pre><div><span></span>'
        '<button>Copy code</button></div><code class="hljs language-python">print(1)</code></pre>'
        "<ul><li>one</li><li>two</li></ul></div>"
    )
    row = {"id": "x", "conversations": turns(("human", "<p>How?<br></p>"), ("gpt", page), ("human", "Why 1 < 2 > 0?"))}

    assert contents(sharegpt.read(row)) == [
        ("user", "How?"),
        ("assistant", "Use <b> like `this`:\n\n```python\nprint(1)\n```\n\n- one\n- two"),
        ("user", "Why 1 < 2 > 0?"),
    ]


def test_sharegpt_keeps_markup_that_the_conversation_is_about() -> None:
    row = {
        "id": "x",
        "conversations": turns(
            ("human", "<div>Make an HTML heading.</div>"),
            ("gpt", '<div class="markdown prose"><p><h1>Hi</h1></p></div>'),
            ("human", "<p>is the tag I want: <i>now</i></p>"),
            ("gpt", "<p>Hi</p>"),
        ),
    }

    assert contents(sharegpt.read(row)) == [
        ("user", "Make an HTML heading."),
        ("assistant", "<h1>Hi</h1>"),
        ("user", "<p>is the tag I want: <i>now</i></p>"),
        ("assistant", "<p>Hi</p>"),
    ]


SWE_SYSTEM = (
    "SETTING: You are a programmer.\n\nCOMMANDS:\nopen\n\nRESPONSE FORMAT:\nDISCUSSION and a block ```ls -a```\n"
)


def trajectory(*steps: tuple[str, str], exit_status: str = "submitted") -> dict[str, Any]:
    system = {"role": "system", "system_prompt": SWE_SYSTEM, "text": None, "mask": False}
    told = [{"role": role, "system_prompt": None, "text": text, "mask": False} for role, text in steps]
    return {"instance_id": "repo-1", "exit_status": exit_status, "trajectory": [system, *told]}


def test_an_agents_commands_become_tool_calls_and_what_it_saw_their_results() -> None:
    row = trajectory(
        ("user", "Fix it.\nbash-$"),
        ("ai", "DISCUSSION\nAs in\n```\nx = 1\n```\nI edit.\n```\nedit 3:3\n    y\nend_of_edit\n```"),
        ("user", "Edited.\nbash-$"),
        ("ai", "I am unsure."),
        ("user", "Your output was not formatted."),
        ("ai", "```bash\nsubmit\n```"),
    )

    conversation = swe_agent.read(row)

    system, issue, step, seen, plain, complaint, last = conversation.messages
    assert system["content"] == "SETTING: You are a programmer.\n\nCOMMANDS:\nopen"
    assert issue["role"] == "user"
    assert step["content"] == "As in\n```\nx = 1\n```\nI edit."
    assert step["tool_calls"][0]["function"] == {
        "name": "bash",
        "arguments": {"command": "edit 3:3\n    y\nend_of_edit"},
    }
    assert seen == {"role": "tool", "tool_call_id": "functions.bash:0", "content": "Edited.\nbash-$"}
    assert plain == {"role": "assistant", "content": "I am unsure."}
    assert complaint["role"] == "user"
    assert last["tool_calls"][0]["id"] == "functions.bash:1"
    assert [tool["function"]["name"] for tool in conversation.tools] == ["bash"]
    assert conversation.conversation_id == "repo-1"
    assert answer_positions(conversation.messages) == [2, 4, 6]


@pytest.mark.parametrize("status", ["exit_context", "submitted (exit_cost)", "early_exit"])
def test_unfinished_trajectories_are_set_aside_by_rule(status: str) -> None:
    with pytest.raises(Unusable) as refused:
        swe_agent.read(trajectory(("user", "Fix it."), exit_status=status))

    assert (refused.value.reason, refused.value.by_rule) == ("exit_status", True)


@pytest.mark.parametrize(
    ("reader", "row", "reason"),
    [
        (ultrachat, {"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role"),
        (sharegpt, {"conversations": turns(("judge", "x"))}, "unknown_role"),
        (swe_agent, trajectory(("environment", "x")), "unknown_role"),
        (ultrachat, {"messages": []}, "empty_conversation"),
        (sharegpt, {"conversations": turns(("human", "<div><br></div>"), ("gpt", "Yes?"))}, "empty_conversation"),
        (mixture_of_thoughts, {"messages": [{"role": "assistant", "content": "x"}]}, "empty_conversation"),
        (opencodeinstruct, {"id": "1", "input": ""}, "empty_conversation"),
        (magicoder, {"instruction": None}, "missing_field"),
        (ultrachat, {"messages": [{"role": "user", "content": 3}]}, "missing_field"),
        (ultrachat, {"messages": ["hi"]}, "missing_field"),
        (openthoughts, {"text": "hi"}, "missing_field"),
    ],
)
def test_rows_that_cannot_be_used_say_why(reader: Any, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as refused:
        reader.read(row)

    assert refused.value.reason == reason


SMITH_SYSTEM = "You solve tasks.\n\nYou have access to the following functions:\n\n---- BEGIN FUNCTION #1: bash ----"
SMITH_STEPS = {
    "tool": [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
            ],
        },
        {"role": "tool", "content": [{"type": "text", "text": "a.py"}], "tool_call_ids": ["toolu_1"]},
    ],
    "xml": [
        {
            "role": "assistant",
            "content": "I look.\n\n<function=bash>\n<parameter=command>ls</parameter>\n</function>",
        },
        {"role": "user", "content": "a.py"},
    ],
    "ticks": [
        {"role": "assistant", "content": "I look.\n```\nls\n```"},
        {"role": "user", "content": "a.py"},
    ],
}


@pytest.mark.parametrize("split", SMITH_STEPS)
def test_swe_smith_steps_become_the_same_calls_in_all_three_ways_to_write_them(split: str) -> None:
    messages = [
        {"role": "system", "content": SMITH_SYSTEM},
        {"role": "user", "content": "Fix it."},
        *SMITH_STEPS[split],
        {"role": "assistant", "content": "Done."},
    ]
    row = {"messages": json.dumps(messages), "instance_id": "repo-1", "traj_id": "repo-1.run", "resolved": True}

    conversation = swe_smith.read(row)

    call = {"id": "functions.bash:0", "type": "function"}
    assert list(conversation.messages) == [
        {"role": "system", "content": "You solve tasks."},
        {"role": "user", "content": "Fix it."},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call | {"function": {"name": "bash", "arguments": {"command": "ls"}}}],
        },
        {"role": "tool", "tool_call_id": "functions.bash:0", "content": "a.py"},
        {"role": "assistant", "content": "Done."},
    ]
    assert (conversation.source_id, conversation.conversation_id) == ("repo-1.run", "repo-1")
    with pytest.raises(Unusable) as refused:
        swe_smith.read(row | {"resolved": False})
    assert refused.value.by_rule


def test_an_answer_is_not_due_while_a_call_waits_for_its_result() -> None:
    calls = [{"id": f"functions.f:{i}", "type": "function", "function": {"name": "f", "arguments": {}}} for i in (0, 1)]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
        {"role": "tool", "tool_call_id": "functions.f:1", "content": "2"},
    ]

    assert answer_positions(messages[:3]) == [1]
    assert answer_positions(messages) == [1, 4]


def test_a_conversation_is_cut_where_it_stops_making_sense() -> None:
    asked = {"role": "user", "content": "a"}
    for bad, note in [
        ({"role": "assistant", "content": "<think>cut"}, "cut:empty_turn"),
        ({"role": "system", "content": "late"}, "cut:late_system"),
        ({"role": "tool", "tool_call_id": "functions.f:0", "content": "x"}, "cut:tool_result_without_call"),
    ]:
        kept, notes = well_formed([asked, bad, {"role": "user", "content": "b"}])
        assert (kept, notes) == ((asked,), (note,))


def test_an_unknown_reader_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="ultrachat"):
        reader_of(SourceSettings(reader="ultra_chat", path=Path("x"), licence="MIT"))


def test_no_demo_prompt_holds_another_formats_marks() -> None:
    sources = Path(__file__).parents[2] / "demo" / "sources"
    rows = [json.loads(line) for line in (sources / "b1_glaive.jsonl").read_text().splitlines() if line.strip()]
    read = 0
    for row in rows:
        try:
            text = json.dumps(glaive.read(row).messages)
        except Unusable:
            continue
        read += 1
        for mark in ("<functioncall>", "FUNCTION RESPONSE", "<|endoftext|>", "SYSTEM:", "Use them if required"):
            assert mark not in text
    assert read > 90
