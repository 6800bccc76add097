"""Files made with any tool: what is read of them, what is not, and that nothing unread is passed."""

import gzip
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from aerie.boundary import row_files
from aerie.boundary.files import FileVerdict, UnreadableRow, judge_file
from aerie.errors import BadInput
from aerie.settings.profile import profile_names

from .families import TINY_VERIFIER, family

F = family("kimi_k25")
GOOD = [301, F.close, 302, F.end]
ROWS: list[dict[str, Any]] = [
    {"prompt_ids": F.prompt, "output_ids": GOOD, "id": "a", "finish_reason": "stop", "completion_tokens": 4,
     "max_new_tokens": 9},
    {"prompt_ids": F.prompt, "output_ids": [301, F.end], "id": "b", "finish_reason": "stop", "completion_tokens": 2,
     "max_new_tokens": 9},
]  # fmt: skip
FORMS = ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "rows"]


def written(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return path
    data = "".join(json.dumps(row) + "\n\n" for row in rows).encode()
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(data))
    return path


def judged(path: Path) -> list[FileVerdict]:
    found = list(judge_file(path, "kimi_k25"))
    assert all(isinstance(verdict, FileVerdict) for verdict in found), found
    return [verdict for verdict in found if isinstance(verdict, FileVerdict)]


@pytest.mark.parametrize("name", FORMS)
def test_file_made_with_other_tools_is_judged_row_by_row(tmp_path: Path, name: str) -> None:
    first, second = judged(written(tmp_path / name, ROWS))
    assert (first.id, first.row, first.verdict, first.reasons) == ("a", 0, "kept", ())
    assert (second.id, second.row, second.reasons) == ("b", 1, ("no_close", "empty_answer"))
    assert second.positions["no_close"] == (1,)


def test_sglang_finish_reason_is_read_and_what_is_missing_is_unchecked(tmp_path: Path) -> None:
    row = {"prompt_ids": F.prompt, "output_ids": [301, 302], "finish_reason": {"type": "length", "length": 2}}
    (verdict,) = judged(written(tmp_path / "rows.jsonl", [row]))
    assert verdict.flags == ("truncated_in_reasoning",)
    assert {"count_mismatch", "foreign_special_token"} <= {*verdict.unchecked}
    assert not {*verdict.unchecked} & {*verdict.reasons, *verdict.flags}


def test_an_openai_server_that_stopped_after_a_tool_call_has_stopped(tmp_path: Path) -> None:
    (verdict,) = judged(written(tmp_path / "rows.jsonl", [{**ROWS[0], "finish_reason": "tool_calls"}]))
    assert verdict.kept


def test_empty_text_as_tools_declares_nothing_known(tmp_path: Path) -> None:
    demo = family("demo")
    output = [301, demo.close, *demo.section(demo.call()), demo.end]
    path = written(tmp_path / "rows.jsonl", [{"prompt_ids": demo.prompt, "output_ids": output, "tools": ""}])
    (verdict,) = judge_file(path, "demo", tokenizer=TINY_VERIFIER)
    assert isinstance(verdict, FileVerdict) and "tool_name_unknown" in verdict.unchecked


def test_tool_text_is_unchecked_without_a_tokenizer_never_passed(tmp_path: Path) -> None:
    row = {"prompt_ids": F.prompt, "output_ids": [301, F.close, *F.section(F.call()), F.end], "finish_reason": "stop"}
    (verdict,) = judged(written(tmp_path / "rows.jsonl", [row]))
    assert {"tool_arguments_not_json", "tool_name_unknown", "foreign_special_token"} <= set(verdict.unchecked)


def test_tags_that_only_a_tokenizer_knows_are_unchecked_without_one(tmp_path: Path) -> None:
    row = {"prompt_ids": [0, 128803, 5, 128804], "output_ids": [6, 1], "finish_reason": "stop"}
    (verdict,) = judge_file(written(tmp_path / "rows.jsonl", [row]), "deepseek_v3_0324")
    assert {"no_close", "second_open", "second_close", "empty_reasoning"} <= {*verdict.unchecked}


def test_counts_are_read_as_pandas_writes_a_column_with_gaps(tmp_path: Path) -> None:
    counts = pa.array([4.0, None, 5.0])
    rows = {"prompt_ids": [F.prompt] * 3, "output_ids": [GOOD] * 3, "completion_tokens": counts}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    assert [verdict.reasons for verdict in judged(tmp_path / "rows.parquet")] == [(), (), ("count_mismatch",)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_tools_of_other_rows_do_not_keep_a_call_from_being_held_against_its_own(tmp_path: Path, name: str) -> None:
    demo = family("demo")

    def row(tool: str, argument: str) -> dict[str, Any]:
        function = {"name": tool, "parameters": {"type": "object", "properties": {argument: {"type": "integer"}}}}
        said = demo.tokenizer.encode(json.dumps({argument: "3"}), add_special_tokens=False)
        name = demo.tokenizer.encode(f"functions.{tool}:0", add_special_tokens=False)
        call = [demo.call_begin, *name, demo.argument_begin, *said, demo.call_end]
        return {
            "prompt_ids": demo.prompt, "output_ids": [301, demo.close, *demo.section(call), demo.end],
            "tools": [{"type": "function", "function": function}],
        }  # fmt: skip

    path = written(tmp_path / name, [row("add", "a"), row("take", "b")])
    verdicts = list(judge_file(path, "demo", tokenizer=TINY_VERIFIER))
    assert [verdict.flags for verdict in verdicts] == [("tool_arguments_schema",)] * 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt_ids": [1]}', "row 1 (line 3): has no output_ids"),
        ('{"output_ids": [1]}', "row 1 (line 3): has no prompt_ids"),
        ('{"prompt_ids": [1], "output_ids": null}', "has no output_ids"),
        ('{"prompt_ids": [1], "output_ids": "1 2"}', "expected output_ids to be a list of integers, found a string"),
        ('{"prompt_ids": [1], "output_ids": ["2"]}', "found a string in it"),
        ('{"prompt_ids": [1], "output_ids": [2.0]}', "found a number with a fraction in it"),
        ('{"prompt_ids": [1], "output_ids": [[2]]}', "found a list in it"),
        ('{"prompt_ids": [1], "output_ids": [2, null]}', "found null in it"),
        ('{"prompt_ids": [1], "output_ids": [2, true]}', "found true or false in it"),
        ('{"prompt_ids": [1], "output_ids": [2], "finish_reason": "why"}', "finish reason 'why'"),
        ('{"prompt_ids": [1], "output_ids": [2], "finish_reason": 3}', "finish reason '3'"),
        ('{"prompt_ids": [1], "output_ids": [2], "max_new_tokens": "8"}', "expected max_new_tokens"),
        ('{"prompt_ids": [1], "output_ids": [2], "max_new_tokens": -1}', "an integer of at least 1"),
        ('{"prompt_ids": [1], "output_ids": [2], "completion_tokens": true}', "expected completion_tokens"),
        ('{"prompt_ids": [1], "output_ids": [2], "completion_tokens": 1.5}', "expected completion_tokens"),
        ('{"prompt_ids": [1], "output_ids": [2], "tools": {"name": "f"}}', "expected tools"),
        ('{"prompt_ids": [1], "output_ids": [2], "tools": "[1]"}', "declarations, each an object with a name"),
        ("[1, 2]", "expected a JSON object, found a list"),
        ('{"prompt_ids": [1', "row 1 (line 3): not JSON"),
        ("\x00", "not JSON"),
        ('{"messages": [{"role": "user", "content": "?"}]}', "found role 'user'"),
    ],
)  # fmt: skip
def test_row_that_cannot_be_judged_is_named_and_the_rest_is_judged(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path / "rows.jsonl", ROWS[:1])
    path.write_text(path.read_text() + line + "\n" + json.dumps(ROWS[0]))
    first, wrong, last = judge_file(path, "kimi_k25")
    assert isinstance(wrong, UnreadableRow) and problem in wrong.problem and str(path) in wrong.problem
    assert isinstance(first, FileVerdict) and first.kept
    assert isinstance(last, FileVerdict) and (last.row, last.kept) == (2, True)


WRONG_COLUMNS = [
    pa.array([["1"]]), pa.array([[1.0]]), pa.array([[True]]), pa.array([[1, None]]), pa.array(["[1]"]), pa.array([7]),
    pa.array([None], pa.list_(pa.int64())),
]  # fmt: skip


@pytest.mark.parametrize("column", WRONG_COLUMNS, ids=lambda column: str(column.type))
def test_parquet_column_that_holds_no_ids_is_never_read_as_ids(tmp_path: Path, column: Any) -> None:
    pq.write_table(pa.table({"prompt_ids": [F.prompt], "output_ids": column}), tmp_path / "rows.parquet")
    (wrong,) = judge_file(tmp_path / "rows.parquet", "kimi_k25")
    assert isinstance(wrong, UnreadableRow) and "row 0: " in wrong.problem and "output_ids" in wrong.problem


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint32()), pa.list_(pa.int64(), 4)], ids=str)
def test_ids_of_any_width_and_kind_of_list_are_judged_alike(tmp_path: Path, kind: Any) -> None:
    rows = pa.table({"prompt_ids": [F.prompt] * 700, "output_ids": pa.array([[5] * 4, *[GOOD] * 699], kind)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    first, *others = judged(tmp_path / "rows.parquet")
    assert not first.kept and all(verdict.kept for verdict in others) and len(others) == 699


def test_integers_beyond_any_vocabulary_are_judged_not_raised(tmp_path: Path) -> None:
    row = {"prompt_ids": F.prompt, "output_ids": [2**63, -1, 10**30], "finish_reason": "stop"}
    (verdict,) = judged(written(tmp_path / "rows.jsonl", [row]))
    assert verdict.positions["id_out_of_range"] == (0, 1, 2)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet"])
def test_file_that_was_cut_short_is_never_taken_for_a_whole_one(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, ROWS * 400)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=f"{name}: cannot be read"):
        list(judge_file(path, "kimi_k25"))


def test_line_too_long_to_be_a_row_is_passed_over_without_holding_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr(row_files, "READ_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text("x" * 5000 + "\n" + json.dumps(ROWS[0]) + "\n" + " " * 2000)
    long, good, long_too = judge_file(path, "kimi_k25")
    assert isinstance(long, UnreadableRow) and "too long" in long.problem
    assert isinstance(good, FileVerdict) and (good.kept, good.row) == (True, 1)
    assert isinstance(long_too, UnreadableRow)


def test_byte_order_mark_and_windows_line_ends_are_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\r\n\r\n" + json.dumps(ROWS[1]).encode())
    assert [verdict.kept for verdict in judged(path)] == [True, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no row"), (b"\n \n", "holds no row"), (b'\n[{"id": 1}]', "jq"), (b"[\n{}]", "jq")],
)
def test_file_without_rows_is_an_error_not_a_pass(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        list(judge_file(tmp_path / "rows.jsonl", "kimi_k25"))


def test_profile_whose_ids_only_its_checkpoint_knows_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--tokenizer"):
        list(judge_file(written(tmp_path / "rows.jsonl", ROWS), "demo"))


@pytest.mark.parametrize("name", profile_names())
def test_every_family_judges_a_file_by_itself_or_says_that_it_needs_the_tokenizer(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "rows.jsonl", [ROWS[0], {"messages": [{"role": "assistant", "content": "Paris"}]}])
    try:
        found = list(judge_file(path, name))
    except BadInput as error:
        assert "--tokenizer" in str(error)
    else:
        assert all(isinstance(verdict, FileVerdict) and verdict.unchecked for verdict in found) and len(found) == 2


def test_missing_file_or_folder_is_one_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path / "none.parquet", tmp_path):
        with pytest.raises(BadInput, match=f"{path}: cannot be read: "):
            list(judge_file(path, "kimi_k25"))


@pytest.mark.parametrize("given", [None, 7, "x", 1.5, ["a", {"b": None}], {"k": [1]}, "\u001b[31mred", "ü"])
def test_verdict_is_one_line_of_plain_json_whatever_the_id_is(tmp_path: Path, given: Any) -> None:
    (verdict,) = judged(written(tmp_path / "rows.jsonl", [{**ROWS[0], "id": given}]))
    line = verdict.as_json()
    assert line.isascii() and line.isprintable()
    document = json.loads(line)
    assert document["id"] == given
    assert list(document) == [
        "file", "row", "id", "verdict", "reasons", "flags", "positions", "unchecked", "reasoning_tokens",
        "answer_tokens", "tool_calls",
    ]  # fmt: skip


def test_parquet_whose_text_is_no_text_is_a_damaged_file_not_a_crash(tmp_path: Path) -> None:
    name = written(tmp_path / "name.parquet", [{**ROWS[0], "zzzz": 1}])
    name.write_bytes(name.read_bytes().replace(b"zzzz", b"\xff\xfe\xfd\xfc"))
    raw = pa.array([b"\xff"])
    text = pa.StringArray.from_buffers(1, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"prompt_ids": [F.prompt], "output_ids": [GOOD], "id": text}), tmp_path / "text.parquet")
    for path in (name, tmp_path / "text.parquet"):
        with pytest.raises(BadInput, match=f"{path}: cannot be read to its end"):
            list(judge_file(path, "kimi_k25"))


@pytest.mark.parametrize("rows_a_group", [200, 10**6])
def test_parquet_is_read_page_by_page_however_large_its_row_groups_are(tmp_path: Path, rows_a_group: int) -> None:
    numbers = np.random.default_rng(0).integers(300, 160_000, 5_000_000).astype(np.int32)
    output = pa.ListArray.from_arrays(np.arange(0, numbers.size + 1, 1000, dtype=np.int32), numbers)
    prompts = pa.array([F.prompt] * len(output), pa.list_(pa.int32()))
    table = pa.table({"prompt_ids": prompts, "output_ids": output})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=rows_a_group, use_dictionary=False)
    size = (tmp_path / "rows.parquet").stat().st_size
    del table, prompts, output, numbers
    most = 0
    tracemalloc.start()
    try:
        for _ in row_files.iterate_file(tmp_path / "rows.parquet", ["prompt_ids", "output_ids"]):
            most = max(most, pa.total_allocated_bytes() + tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert most < size / 2
