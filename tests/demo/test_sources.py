"""The sample sources as they are shipped: the shapes and the quirks of the real data sets."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from make_tiny_verifier.sources import write_sources


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(path) if line]


def test_regenerating_gives_the_same_bytes(sources, verifier, tmp_path):
    write_sources(tmp_path, verifier)
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(f.name for f in sources.iterdir())
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (sources / file.name).read_bytes(), file.name


def test_size(sources):
    assert sum(file.stat().st_size for file in sources.iterdir()) < 2_500_000


@pytest.mark.parametrize("name", ["b1_glaive", "b2_opencodeinstruct", "b3_magicoder", "b4_mixturethoughts"])
def test_blank_line_and_duplicate(sources, name):
    found = Counter(lines(sources / f"{name}.jsonl"))
    assert found.pop("") == 1
    assert sorted(found.values())[-2:] == [1, 2]


def test_glaive(sources):
    rows = rows_of(sources / "b1_glaive.jsonl")
    assert {tuple(row) for row in rows} == {("system", "chat")}
    assert all(row["system"].startswith("SYSTEM: You are a helpful assistant") for row in rows)
    assert any('}\n{\n    "name"' in row["system"] for row in rows), "no declarations back to back"
    assert any("{" not in row["system"] for row in rows), "no row without functions"
    chats = "".join(row["chat"] for row in rows)
    assert re.search(r"""<functioncall> \{"name": "\w+", "arguments": '\{"[^']+\}'\} <\|endoftext\|>""", chats)
    assert re.search(r"""<functioncall> \{"name": "\w+", "arguments": \{"[^']+\}\} <\|endoftext\|>""", chats)
    assert "\n\n\nFUNCTION RESPONSE: {" in chats
    assert sum(row["chat"] == "" for row in rows) == 1


def test_opencodeinstruct(sources):
    rows = rows_of(sources / "b2_opencodeinstruct.jsonl")
    assert list(rows[0]) == [
        *("id", "input", "output", "domain", "generation_algorithm", "llm_judgement", "unit_tests"),
        *("tests_execution_status", "average_test_score"),
    ]
    assert all(isinstance(value, str) for row in rows for value in row.values())
    assert json.loads(rows[0]["unit_tests"]) and json.loads(rows[0]["llm_judgement"])
    inputs_of: dict[str, set[str]] = {}
    for row in rows:
        inputs_of.setdefault(row["id"], set()).add(row["input"])
    assert [len(inputs) for inputs in inputs_of.values() if len(inputs) > 1] == [2], "no id with two texts"


def test_magicoder(sources):
    rows = rows_of(sources / "b3_magicoder.jsonl")
    assert [list(row) for row in rows if len(row) != 2] == [["response"]]
    assert {type(row.get("instruction")) for row in rows} == {str, type(None)}


def test_mixture_of_thoughts(sources):
    rows = rows_of(sources / "b4_mixturethoughts.jsonl")
    assert {tuple(row) for row in rows} == {("messages", "num_tokens", "source")}
    assert all(row["messages"][1]["content"].startswith("<think>\n") for row in rows[:100])
    roles = {message["role"] for row in rows for message in row["messages"]}
    assert roles == {"user", "assistant", "critic"}
    assert sum(not row["messages"] for row in rows) == 1


def test_openthoughts(sources):
    rows = rows_of(sources / "b5_openthoughts.jsonl")
    assert {tuple(row) for row in rows} == {("system", "conversations"), ("conversations",)}
    assert all("<|begin_of_thought|>" in row["system"] for row in rows if "system" in row)
    assert rows[0]["conversations"][1]["value"].startswith("<|begin_of_thought|>")
    roles = {entry["from"] for row in rows for entry in row["conversations"]}
    assert roles == {"user", "assistant", "human", "gpt", "judge"}


def test_ultrachat(sources):
    rows = rows_of(sources / "b6_ultrachat.jsonl")
    assert {tuple(row) for row in rows} == {("prompt", "prompt_id", "messages")}
    assert all(row["prompt"] == row["messages"][0]["content"] for row in rows if row["messages"])
    assert max(len(row["messages"]) for row in rows) >= 6


def test_sharegpt(sources):
    rows = json.loads((sources / "b7_sharegpt.json").read_text(encoding="utf-8"))
    conversations = {json.dumps(row["conversations"]): row["id"] for row in rows}
    assert max(Counter(conversations.values()).values()) == 2, "no id of two conversations"
    assert {re.sub(r".*_", "", row["id"]) for row in rows} == {"0", "1", "2"}
    orders = ["".join(entry["from"][0] for entry in row["conversations"]) for row in rows]
    assert any(order.startswith("gh") for order in orders)
    assert any("hh" in order for order in orders)
    assert any(entry["value"].startswith("<div") for row in rows for entry in row["conversations"])


def test_swe_agent(sources):
    table = pq.read_table(sources / "b8_sweagent.parquet")
    assert table.column_names == [
        *("instance_id", "model_name", "target", "trajectory", "exit_status", "generated_patch", "eval_logs")
    ]
    rows = table.to_pylist()
    assert list(rows[0]["trajectory"][0]) == ["cutoff_date", "mask", "role", "system_prompt", "text"]
    assert rows[0]["trajectory"][0]["text"] is None and rows[0]["trajectory"][0]["system_prompt"]
    assert all(
        re.search(r"\n```\n(.|\n)+\n```$", step["text"]) for step in rows[0]["trajectory"] if step["role"] == "ai"
    )
    assert {step["role"] for row in rows for step in row["trajectory"]} == {"system", "user", "ai", "environment"}
    exits = Counter(row["exit_status"] for row in rows)
    assert exits.pop("submitted") > 150
    assert exits.total() == 10
    assert max(Counter(row["instance_id"] for row in rows).values()) == 2


@pytest.mark.parametrize("name", ["a1_pretokenised", "a2_pretokenised"])
def test_tokenised(sources, verifier, tokenizer, name):
    path = sources / f"{name}.jsonl"
    rows = rows_of(path) if path.exists() else pq.read_table(sources / f"{name}.parquet").to_pylist()
    assert len(rows) == len({row["id"] for row in rows}) == 64
    opening, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "<|im_end|>"))
    segments = Counter()
    for row in rows:
        ids, mask = row["input_ids"], row["loss_mask"]
        assert len(ids) == len(mask) and set(mask) == {0, 1} and mask[-1] == 1
        starts = [i for i in range(1, len(ids)) if mask[i] > mask[i - 1]]
        ends = [i for i in range(len(ids)) if mask[i] and (i + 1 == len(ids) or not mask[i + 1])]
        assert all(ids[i - 1] == opening for i in starts)
        assert all(ids[i] == end for i in ends)
        segments[len(starts)] += 1
        text = tokenizer.decode(ids)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert (max(segments) > 1) == (name == "a2_pretokenised")
    sidecar = yaml.safe_load((sources / f"{name}.meta.yaml").read_text())
    assert sidecar["tokenizer_sha256"] == hashlib.sha256((verifier / "tokenizer.json").read_bytes()).hexdigest()
    assert sidecar["thinking"] is True
    assert sidecar["licence"] and sidecar["source"]
