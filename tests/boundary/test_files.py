import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aerie.boundary.files import judge_file
from aerie.errors import BadInput

from .families import family

F = family("kimi_k25")
GOOD = [301, F.close, 302, F.end]
ROWS: list[dict[str, Any]] = [
    {"prompt_ids": F.prompt, "output_ids": GOOD, "id": "a", "finish_reason": "stop", "completion_tokens": 4,
     "max_new_tokens": 9},
    {"prompt_ids": F.prompt, "output_ids": [301, F.end], "id": "b", "finish_reason": "stop", "completion_tokens": 2,
     "max_new_tokens": 9},
]  # fmt: skip


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_file_made_with_other_tools_is_judged_row_by_row(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, ROWS)
    first, second = judge_file(path, "kimi_k25")
    assert (first.id, first.row, first.verdict, first.reasons) == ("a", 0, "kept", ())
    assert (second.id, second.row, second.reasons) == ("b", 1, ("no_close", "empty_answer"))
    assert second.positions["no_close"] == (1,)


def test_sglang_finish_reason_is_read_and_what_is_missing_is_unchecked(tmp_path: Path) -> None:
    row = {"prompt_ids": F.prompt, "output_ids": [301, 302], "finish_reason": {"type": "length", "length": 2}}
    (verdict,) = judge_file(written(tmp_path / "rows.jsonl", [row]), "kimi_k25")
    assert verdict.flags == ("truncated_in_reasoning",)
    assert set(verdict.unchecked) == {"count_mismatch", "foreign_special_token"}


def test_tool_text_is_unchecked_without_a_tokenizer_never_passed(tmp_path: Path) -> None:
    row = {"prompt_ids": F.prompt, "output_ids": [301, F.close, *F.section(F.call()), F.end], "finish_reason": "stop"}
    (verdict,) = judge_file(written(tmp_path / "rows.jsonl", [row]), "kimi_k25")
    assert {"tool_arguments_not_json", "tool_name_unknown"} <= set(verdict.unchecked)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_ids": [1]}', "row 1: expected output_ids"),
        ('{"prompt_ids": [1], "output_ids": ["a"]}', "row 1: expected output_ids"),
        ('{"prompt_ids": [1], "output_ids": [2.0]}', "row 1: expected output_ids"),
        ('{"prompt_ids": [1], "output_ids": [2], "finish_reason": "why"}', "row 1: finish reason 'why'"),
        ('{"prompt_ids": [1], "output_ids": [2], "max_new_tokens": "8"}', "row 1: expected max_new_tokens"),
        ("[1, 2]", "line 3: expected an object"),
        ('{"prompt_ids": [1', "line 3: not JSON"),
    ],
)
def test_row_that_cannot_be_judged_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "rows.jsonl", ROWS[:1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadInput, match=message):
        list(judge_file(path, "kimi_k25"))


def test_profile_whose_ids_only_its_checkpoint_knows_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--tokenizer"):
        list(judge_file(written(tmp_path / "rows.jsonl", ROWS), "demo"))


def test_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.parquet", "none.txt"):
        with pytest.raises(BadInput, match=name):
            list(judge_file(tmp_path / name, "kimi_k25"))
