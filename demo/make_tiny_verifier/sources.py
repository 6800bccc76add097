"""Writes the demo's sample sources: ten small files in the exact shapes, quirks included, of real data sets.

All content is held out from the verifier's training. Every file of the B series also has a few rows that a reader
must survive or refuse: a blank line, a row that occurs twice, an empty conversation, a role that nobody knows.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from make_tiny_verifier.conversation import Conversation
from make_tiny_verifier.corpus import (
    DATASETS,
    GLAIVE_SYSTEM,
    GLAIVE_SYSTEM_WITHOUT,
    SHAREGPT_GREETINGS,
    SWE_SYSTEM,
    held_out,
)
from make_tiny_verifier.files import replaced_directory

SEED = 3
CONVERSATIONS = 160
"""Usable conversations in each file of the B series."""
TOKENISED_EACH = 8
"""Conversations of each of the eight kinds in each file of the A series."""

Row = dict[str, Any]


def source_conversations(dataset: str) -> tuple[Conversation, ...]:
    """The conversations behind the usable rows of one B file, in their order."""
    return _all_conversations(dataset)[:CONVERSATIONS]


def tokenised_conversations(series: str) -> list[Conversation]:
    """The conversations of `A1` or `A2`, none of which is in a B file."""
    start = CONVERSATIONS + (TOKENISED_EACH if series == "A2" else 0)
    found = []
    for dataset in DATASETS:
        found += _all_conversations(dataset)[start : start + TOKENISED_EACH]
    Random(f"{series}:{SEED}").shuffle(found)
    return found


@cache
def _all_conversations(dataset: str) -> tuple[Conversation, ...]:
    return tuple(held_out(dataset, SEED, CONVERSATIONS + 2 * TOKENISED_EACH))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# ---------------------------------------------------------------- B1


def _glaive_chat(conversation: Conversation, r: Random) -> str:
    chat = ""
    for position, turn in enumerate(conversation.turns):
        after_call = position and conversation.turns[position - 1].tool_call
        chat += f"{'FUNCTION RESPONSE' if after_call else 'USER'}: {turn.request}\n\n\n"
        answer = turn.answer
        if turn.tool_call:
            arguments = json.dumps(turn.tool_call.arguments)
            if r.random() < 0.75:
                arguments = f"'{arguments}'"
            call = f'<functioncall> {{"name": "{turn.tool_call.name}", "arguments": {arguments}}}'
            answer = f"{answer} {call}" if answer else call
        chat += f"ASSISTANT: {answer} <|endoftext|>\n\n\n"
    return chat[:-2]


def _glaive(conversations: Sequence[Conversation], r: Random) -> list[Row | None]:
    rows: list[Row | None] = []
    for conversation in conversations:
        system = GLAIVE_SYSTEM if conversation.tools else GLAIVE_SYSTEM_WITHOUT
        declarations = "".join(f"{json.dumps(tool, indent=4)}\n" for tool in conversation.tools)
        rows.append({"system": f"SYSTEM: {system}\n{declarations}", "chat": _glaive_chat(conversation, r)})
    with_tools = next(row for row in rows if "{" in row["system"])
    return [
        *rows,
        None,
        rows[4],
        {"system": rows[0]["system"], "chat": ""},
        {"system": rows[0]["system"], "chat": "USER:  \n\n\nASSISTANT: Hello! <|endoftext|>\n"},
        {"system": with_tools["system"][:-40], "chat": with_tools["chat"]},
    ]


# ---------------------------------------------------------------- B2, B3


def _opencodeinstruct(conversations: Sequence[Conversation], r: Random) -> list[Row | None]:
    rows: list[Row | None] = []
    for conversation in conversations:
        turn = conversation.turns[0]
        name = re.search(r"def (\w+)\(", turn.answer)[1]
        passed = [r.random() < 0.9 for _ in range(5)]
        judgement = {
            "requirement_conformance": {"score": r.randint(3, 5), "justification": "It does what is asked."},
            "logical_correctness": {"score": r.randint(3, 5), "justification": "The expression is right."},
        }
        rows.append(
            {
                "id": _digest("opencodeinstruct", turn.request)[:32],
                "input": turn.request,
                "output": turn.answer,
                "domain": r.choice(["generic", "algorithmic"]),
                "generation_algorithm": r.choice(["self-instruct", "evol-instruct"]),
                "llm_judgement": json.dumps(judgement),
                "unit_tests": json.dumps([f"\nassert callable({name})\n"] * len(passed)),
                "tests_execution_status": json.dumps(["pass" if ok else "fail" for ok in passed]),
                "average_test_score": str(sum(passed) / len(passed)),
            }
        )
    return [
        *rows,
        None,
        rows[7],
        rows[9] | {"input": rows[10]["input"] + "\n\nKeep it short."},  # the same id, another text
        rows[11] | {"id": _digest("opencodeinstruct", "empty")[:32], "input": ""},
        rows[12] | {"id": _digest("opencodeinstruct", "unscored")[:32], "average_test_score": ""},
    ]


def _magicoder(conversations: Sequence[Conversation], _: Random) -> list[Row | None]:
    rows: list[Row | None] = [{"instruction": c.turns[0].request, "response": c.turns[0].answer} for c in conversations]
    return [
        *rows,
        None,
        rows[7],
        {"instruction": "", "response": rows[8]["response"]},
        {"instruction": None, "response": rows[9]["response"]},
        {"response": rows[10]["response"]},
    ]


# ---------------------------------------------------------------- B4, B5


def _mixture_of_thoughts(conversations: Sequence[Conversation], _: Random) -> list[Row | None]:
    def row(*messages: tuple[str, str]) -> Row:
        listed = [{"role": role, "content": content} for role, content in messages]
        words = sum(len(content.split()) for _, content in messages)
        return {"messages": listed, "num_tokens": 2 * words, "source": "open-r1/OpenR1-Math-220k"}

    rows: list[Row | None] = []
    for turn in (c.turns[0] for c in conversations):
        other = f"<think>\nOkay, so I have this problem. {turn.reasoning} Wait, let me check that again.\n</think>\n\n"
        rows.append(row(("user", turn.request), ("assistant", other + turn.answer)))
    return [
        *rows,
        None,
        rows[7],
        row(),
        row(("critic", "The solution above is wrong."), ("assistant", "<think>\n\n</think>\n\nI see.")),
        row(("assistant", "<think>\nNobody asked.\n</think>\n\nHello.")),
    ]


OPENTHOUGHTS_SYSTEM = (
    "Your role as an assistant involves thoroughly exploring questions through a systematic long thinking process "
    "before providing the final precise and accurate solutions. Please structure your response into two main "
    "sections: Thought and Solution. In the Thought section, detail your reasoning process using the specified "
    "format: <|begin_of_thought|> {thought with steps separated with '\\n\\n'} <|end_of_thought|> Each step should "
    "include detailed considerations such as analysing questions, summarising relevant findings and verifying the "
    "current steps. In the Solution section, based on the Thought section, present the final solution that you deem "
    "correct, formatted as follows: <|begin_of_solution|> {final formatted, precise, and clear solution} "
    "<|end_of_solution|> Now, try to solve the following question through the above guidelines:"
)


def _openthoughts(conversations: Sequence[Conversation], _: Random) -> list[Row | None]:
    """Most rows as in OpenThoughts-114k, every eighth as in OpenThoughts3 (other role names, no system prompt)."""
    rows: list[Row | None] = []
    for position, turn in enumerate(c.turns[0] for c in conversations):
        if position % 8 == 7:
            reply = f"<think>\nHmm. {turn.reasoning}\n</think>\n\n{turn.answer}"
            rows.append(_from_value(("human", turn.request), ("gpt", reply)))
            continue
        reply = (
            f"<|begin_of_thought|>\n\nHmm. {turn.reasoning}\n\n<|end_of_thought|>\n\n"
            f"<|begin_of_solution|>\n\n{turn.answer}\n\n<|end_of_solution|>"
        )
        rows.append({"system": OPENTHOUGHTS_SYSTEM} | _from_value(("user", turn.request), ("assistant", reply)))
    return [
        *rows,
        None,
        rows[5],
        {"system": OPENTHOUGHTS_SYSTEM, "conversations": []},
        {"system": OPENTHOUGHTS_SYSTEM} | _from_value(("judge", "Which answer is best?"), ("assistant", "The first.")),
        {"system": OPENTHOUGHTS_SYSTEM} | _from_value(("user", "   "), ("assistant", "I need a question.")),
    ]


def _from_value(*entries: tuple[str, str]) -> Row:
    return {"conversations": [{"from": role, "value": value} for role, value in entries]}


# ---------------------------------------------------------------- B6, B7


def _ultrachat(conversations: Sequence[Conversation], _: Random) -> list[Row | None]:
    rows: list[Row | None] = []
    for conversation in conversations:
        messages = []
        for turn in conversation.turns:
            messages.append({"content": turn.request, "role": "user"})
            messages.append({"content": turn.answer, "role": "assistant"})
        prompt = conversation.turns[0].request
        rows.append({"prompt": prompt, "prompt_id": _digest("ultrachat", prompt), "messages": messages})
    odd = [{"content": "Please go on.", "role": "narrator"}, {"content": "Once upon a time.", "role": "assistant"}]
    return [
        *rows,
        None,
        rows[7],
        {"prompt": "", "prompt_id": _digest("ultrachat", ""), "messages": []},
        {"prompt": "Please go on.", "prompt_id": _digest("ultrachat", "narrator"), "messages": odd},
    ]


def _sharegpt(conversations: Sequence[Conversation], r: Random) -> list[Row]:
    """Parts of one long conversation share the first half of their id, and some ids occur for different rows."""
    rows: list[Row] = []
    for position, conversation in enumerate(conversations):
        entries: list[tuple[str, str]] = []
        if r.random() < 0.15:
            entries.append(("gpt", "Hello! How can I help you today?"))
        for turn in conversation.turns:
            greeting, _, rest = turn.request.partition("\n\n")
            if greeting in SHAREGPT_GREETINGS and rest:
                entries += [("human", greeting), ("human", rest)]
            else:
                entries.append(("human", turn.request))
            answer = turn.answer
            if r.random() < 0.15:
                answer = f'<div class="markdown prose"><p>{answer}</p></div>'
            entries.append(("gpt", answer))
        part = position % 9 if position % 9 < 3 else 0
        rows.append({"id": f"{_digest('sharegpt', str(position - part))[:7]}_{part}"} | _from_value(*entries))
    return [
        *rows,
        rows[4],
        {"id": rows[10]["id"]} | _from_value(("human", "Convert 3 km to m."), ("gpt", "3 km = 3000 m")),
        {"id": f"{_digest('sharegpt', 'empty')[:7]}_0", "conversations": []},
        {"id": f"{_digest('sharegpt', 'moderator')[:7]}_0"}
        | _from_value(("moderator", "This was removed."), ("gpt", "I see.")),
        {"id": f"{_digest('sharegpt', 'gpt')[:7]}_0"} | _from_value(("gpt", "Hello! How can I help you today?")),
        {"id": f"{_digest('sharegpt', 'html')[:7]}_0"} | _from_value(("human", "<div><br></div>"), ("gpt", "Yes?")),
    ]


# ---------------------------------------------------------------- B8

TRAJECTORY_STEP = pa.struct(
    [
        ("cutoff_date", pa.string()),
        ("mask", pa.bool_()),
        ("role", pa.string()),
        ("system_prompt", pa.string()),
        ("text", pa.string()),
    ]
)
SWEAGENT_SCHEMA = pa.schema(
    [
        ("instance_id", pa.string()),
        ("model_name", pa.string()),
        ("target", pa.bool_()),
        ("trajectory", pa.list_(TRAJECTORY_STEP)),
        ("exit_status", pa.string()),
        ("generated_patch", pa.string()),
        ("eval_logs", pa.string()),
    ]
)
SWE_RESPONSE_FORMAT = (
    "\n\nRESPONSE FORMAT:\nYour shell prompt is bash-$. Write a discussion of what you are going to do, then exactly "
    "one command in a code block:\nDISCUSSION\nI look for the file.\n```\nfind_file core.py\n```"
)
OTHER_EXITS = ["exit_context", "exit_format", "exit_cost", "early_exit", "submitted (exit_context)"]


def _step(role: str, text: str | None, system_prompt: str | None = None) -> Row:
    cutoff = "01.01.2023" if role == "system" else None
    return {"cutoff_date": cutoff, "mask": False, "role": role, "system_prompt": system_prompt, "text": text}


def _sweagent(conversations: Sequence[Conversation], r: Random) -> list[Row]:
    """Several trajectories of one instance share their instance_id; every tenth ended in another way."""
    rows: list[Row] = []
    for position, conversation in enumerate(conversations):
        trajectory = [_step("system", None, SWE_SYSTEM + SWE_RESPONSE_FORMAT)]
        for turn in conversation.turns:
            command = turn.tool_call.arguments["command"]
            said = f"DISCUSSION\n{turn.answer}\n```\n{command}\n```"
            trajectory += [_step("user", turn.request), _step("ai", said)]
        instance = position - 1 if position % 12 == 1 else position
        rows.append(
            {
                "instance_id": f"example__repo-{instance + 100}",
                "model_name": "swe-agent-llama-70b",
                "target": r.random() < 0.3,
                "trajectory": trajectory,
                "exit_status": "submitted",
                "generated_patch": "diff --git a/core.py b/core.py\n",
                "eval_logs": "1 passed",
            }
        )
    unfinished = [
        rows[2 * i] | {"instance_id": f"example__repo-{900 + i}", "exit_status": status, "target": False}
        for i, status in enumerate(OTHER_EXITS * 2)
    ]
    odd = [_step("system", None, SWE_SYSTEM + SWE_RESPONSE_FORMAT), _step("environment", "The shell was closed.")]
    return [
        *rows,
        *unfinished,
        rows[7],
        rows[8] | {"instance_id": "example__repo-990", "trajectory": []},
        rows[9] | {"instance_id": "example__repo-991", "trajectory": odd},
    ]


# ---------------------------------------------------------------- A1, A2


def tokenised_row(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, segments: int) -> Row:
    """`input_ids` and `loss_mask` of a conversation's first `segments` answers, or of its last alone if it is 1.

    More than one segment is a tool loop, in which the chat template keeps the reasoning of every step: each step's
    answer has mask 1, everything between has mask 0.
    """
    turns = range(segments) if segments > 1 else [len(conversation.turns) - 1]
    ids: list[int] = []
    mask: list[int] = []
    done = ""
    for index in turns:
        prompt = conversation.prompt(index, tokenizer, keep_reasoning=segments > 1)
        if not prompt.startswith(done):
            raise ValueError(f"turn {index} does not continue the one before: {conversation.turns[0].request}")
        completion = conversation.completion(index)
        for text, value in ((prompt.removeprefix(done), 0), (completion, 1)):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [value] * len(piece)
        done = prompt + completion
    return {"input_ids": ids, "loss_mask": mask}


def _loop_length(conversation: Conversation) -> int:
    """Answers in the tool loop that the conversation begins with: its calls, and the answer after them."""
    calls = 0
    while calls < len(conversation.turns) and conversation.turns[calls].tool_call:
        calls += 1
    return min(calls + 1, len(conversation.turns))


def _tokenised(series: str, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    rows = []
    for number, conversation in enumerate(tokenised_conversations(series)):
        segments = _loop_length(conversation) if series == "A2" else 1
        row = tokenised_row(conversation, tokenizer, segments)
        rows.append(row | {"id": f"{series.lower()}-{number:04d}", "source": conversation.dataset.partition("_")[2]})
    return rows


TOKENISED_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int32())),
        ("id", pa.string()),
        ("source", pa.string()),
    ]
)


# ---------------------------------------------------------------- files

WRITERS: dict[str, Callable[[Sequence[Conversation], Random], list[Any]]] = {
    "B1_glaive": _glaive,
    "B2_opencodeinstruct": _opencodeinstruct,
    "B3_magicoder": _magicoder,
    "B4_mixturethoughts": _mixture_of_thoughts,
    "B5_openthoughts": _openthoughts,
    "B6_ultrachat": _ultrachat,
    "B7_sharegpt": _sharegpt,
    "B8_sweagent": _sweagent,
}


def _write_lines(path: Path, rows: list[Row | None]) -> None:
    """JSON lines; None is a blank line."""
    lines = ("" if row is None else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_sources(out: Path, verifier: Path) -> None:
    """Writes all ten files, and a sidecar for each of the A series, to the directory `out`."""
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    sidecar = {
        "tokenizer_sha256": hashlib.sha256((verifier / "tokenizer.json").read_bytes()).hexdigest(),
        "model": "tiny_verifier",
        "thinking": True,
        "licence": "CC0-1.0",
        "source": "made up by demo/make_tiny_verifier/sources.py",
    }
    with replaced_directory(out) as directory:
        for dataset, write in WRITERS.items():
            rows = write(source_conversations(dataset), Random(f"{dataset}:rows"))
            name = dataset.lower()
            if dataset == "B7_sharegpt":
                text = json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
                (directory / f"{name}.json").write_text(text, encoding="utf-8")
            elif dataset == "B8_sweagent":
                pq.write_table(pa.Table.from_pylist(rows, SWEAGENT_SCHEMA), directory / f"{name}.parquet")
            else:
                _write_lines(directory / f"{name}.jsonl", rows)
        _write_lines(directory / "a1_pretokenised.jsonl", _tokenised("A1", tokenizer))
        table = pa.Table.from_pylist(_tokenised("A2", tokenizer), TOKENISED_SCHEMA)
        pq.write_table(table, directory / "a2_pretokenised.parquet")
        for name in ("a1_pretokenised", "a2_pretokenised"):
            (directory / f"{name}.meta.yaml").write_text(yaml.safe_dump(sidecar, sort_keys=False))
