"""The response log after crashes, damage and full disks."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.artefacts.response_log import (
    DamagedRow,
    Response,
    ResponseLog,
    iterate_responses,
    latest_responses,
    latest_rows,
    read_response,
    scan,
)
from aerie.errors import Failed, Retryable


def response(sample_id: str, *, attempt: int = 1, ids: tuple[int, ...] = (5, 6, 7), **changes) -> Response:
    fields = {
        "sample_id": sample_id, "attempt": attempt, "prompt_sha256": "00", "prompt_tokens": 3,
        "completion_tokens": len(ids), "max_new_tokens": 64, "finish_reason": {"type": "stop", "matched": 7},
        "launch_token": "token", "meta_info": {"id": "x", "note": 'a "quoted", \\ and é'}, "output_ids": ids,
    }  # fmt: skip
    return Response(**{**fields, **changes})


def write(path: Path, *responses: Response) -> ResponseLog:
    with ResponseLog(path) as log:
        for row in responses:
            log.append(row)
    return log


@settings(max_examples=25, deadline=None)
@given(
    name=st.text(min_size=1, max_size=30),
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple),
    meta=st.dictionaries(
        st.text(max_size=20),
        st.one_of(st.none(), st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    ),
)
def test_any_row_reads_back_as_it_was_written(tmp_path_factory, name, ids, meta):
    path = tmp_path_factory.mktemp("log") / "responses.jsonl"
    row = response(name, ids=ids, meta_info=meta)
    write(path, row)
    assert list(iterate_responses(path)) == [row]
    (scanned,) = scan(path)
    assert scanned.head.meta_info == meta and read_response(path, scanned) == row


def test_a_figure_that_json_cannot_hold_is_kept_as_a_word_and_not_lost(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a", meta_info={"rate": float("inf"), "share": float("nan")}))
    assert json.loads(path.read_text())["meta_info"] == {"rate": "Infinity", "share": "NaN"}


def test_the_log_is_json_lines_that_other_tools_read(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"), response("b"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["sample_id"], row["output_ids"]) for row in rows] == [("a", [5, 6, 7]), ("b", [5, 6, 7])]


def test_a_tail_torn_at_any_byte_is_no_row_and_is_cut_at_open(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"))
    whole = path.read_bytes()
    for cut in [*range(1, 40, 3), *range(40, len(whole), 17), len(whole) - 1]:
        path.write_bytes(whole + whole[:cut])
        assert [row.sample_id for row in iterate_responses(path)] == ["a"]
        log = write(path, response("b"))
        assert (log.repaired.torn_offset, log.repaired.torn_bytes) == (len(whole), cut)
        assert [row.sample_id for row in iterate_responses(path)] == ["a", "b"]


@pytest.mark.parametrize("where", [0, 3, 40, -12, -5, -2])
def test_a_bit_flipped_in_the_middle_is_named_by_file_and_offset_and_set_aside(tmp_path, where):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"), response("b"), response("c"))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    bad = bytearray(second)
    bad[where] ^= 1
    path.write_bytes(first + bad + third)
    with pytest.raises(Failed, match=rf"responses\.jsonl: the row at byte {len(first)}, "):
        list(iterate_responses(path))
    with pytest.raises(Failed, match=rf"byte {len(first)}"):
        latest_rows(path)
    log = write(path)
    (damaged,) = log.repaired.damaged
    assert damaged.offset == len(first)
    assert (tmp_path / "responses.jsonl.corrupt").read_bytes() == bad
    assert [row.sample_id for row in iterate_responses(path)] == ["a", "c"]


def test_a_damaged_row_says_which_sample_it_may_be(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("sample-17"))
    path.write_bytes(path.read_bytes().replace(b'"output_ids":[5', b'"output_ids":[4'))
    (row,) = scan(path)
    assert isinstance(row, DamagedRow) and row.sample_id == "sample-17"


def test_of_several_rows_of_a_sample_the_highest_attempt_counts_and_a_crashs_duplicate_only_once(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a", attempt=2, ids=(2,)), response("b"), response("a", ids=(1,)), response("b"))
    assert [(row.sample_id, row.attempt, row.output_ids) for row in latest_responses(path)] == [
        ("a", 2, (2,)),
        ("b", 1, (5, 6, 7)),
    ]


def test_a_missing_log_has_no_rows(tmp_path):
    assert list(scan(tmp_path / "no.jsonl")) == []
    assert list(latest_responses(tmp_path / "no.jsonl")) == []


def test_a_full_disk_is_worth_retrying_and_leaves_only_whole_rows(tmp_path, monkeypatch):
    path = tmp_path / "responses.jsonl"
    log = ResponseLog(path)
    log.append(response("a"))
    log.sync()
    log.append(response("b"))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(Retryable, match="No space left"):
            log.sync()
    assert [row.sample_id for row in iterate_responses(path)] == ["a"]
    log.append(response("c"))
    log.close()
    assert [row.sample_id for row in iterate_responses(path)] == ["a", "c"]


def test_rows_are_on_disk_after_sync_and_not_claimed_before(tmp_path):
    path = tmp_path / "responses.jsonl"
    log = ResponseLog(path)
    log.append(response("a"))
    assert subprocess.run(["wc", "-l", path], capture_output=True, text=True, check=True).stdout.split()[0] == "0"
    log.sync()
    assert subprocess.run(["wc", "-l", path], capture_output=True, text=True, check=True).stdout.split()[0] == "1"
    log.close()
