"""The response log after crashes, damage and full disks."""

import errno
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.artefacts import response_log
from aerie.artefacts.response_log import (
    Damage,
    Response,
    ResponseLog,
    encode,
    iterate_responses,
    latest_responses,
    latest_rows,
    log_files,
    read_latest,
    read_responses,
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


def write(path: Path, *responses: Response, **options) -> ResponseLog:
    with ResponseLog(path, **options) as log:
        for row in responses:
            log.append(row)
            log.sync()
    return log


def ids_in(path: Path) -> list[str]:
    return [row.sample_id for row in iterate_responses(path)]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    assert list(read_responses([scanned])) == [(scanned, row)]


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
        assert (log.repaired.torn.offset, log.repaired.torn.size) == (len(whole), cut)
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
    assert isinstance(row, Damage) and row.sample_id == "sample-17"


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


def write_segments(path: Path, count: int = 6) -> None:
    """``count`` rows, two in each sealed segment and one left in the live file where ``count`` is odd."""
    size = len(encode(response("s0")))
    write(path, *(response(f"s{number}") for number in range(count)), segment_bytes=2 * size)


def test_a_file_that_is_full_is_sealed_and_read_as_before_by_us_and_by_zcat(tmp_path):
    path = tmp_path / "responses.jsonl"
    write_segments(path, 5)
    assert files_in(tmp_path) == [
        "responses.000001.index.json.gz", "responses.000001.jsonl.gz", "responses.000002.index.json.gz",
        "responses.000002.jsonl.gz", "responses.jsonl",
    ]  # fmt: skip
    expected = [f"s{number}" for number in range(5)]
    assert ids_in(path) == expected and [row.sample_id for row in latest_responses(path)] == expected
    command = f"(zcat {tmp_path}/responses.*.jsonl.gz; cat {path})"
    lines = subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout.splitlines()
    assert [json.loads(line)["sample_id"] for line in lines] == expected
    log = ResponseLog(path)
    assert [row.sample_id for row in log.take_rows()] == expected
    assert dict(log.row_counts) == dict(zip(log_files(path), (2, 2, 1), strict=True))
    log.close()


def test_a_log_that_grew_beyond_a_segment_before_is_sealed_when_it_is_opened(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"), response("b"))
    with ResponseLog(path, segment_bytes=10) as log:
        assert [(row.path.name, row.sample_id) for row in log.take_rows()] == [
            ("responses.000001.jsonl.gz", "a"),
            ("responses.000001.jsonl.gz", "b"),
        ]
        assert path.stat().st_size == 0
    assert ids_in(path) == ["a", "b"]


def test_any_rows_of_several_segments_are_read_in_the_order_of_the_log(tmp_path):
    path = tmp_path / "responses.jsonl"
    write_segments(path, 7)
    rows = list(scan(path))
    asked = [rows[number] for number in (6, 3, 0, 4)]
    assert [read.sample_id for _, read in read_responses(asked)] == ["s0", "s3", "s4", "s6"]


def test_samples_are_read_while_the_log_is_sealed_under_the_readers_hands(tmp_path):
    path = tmp_path / "responses.jsonl"
    done = threading.Event()

    def fill() -> None:
        write(path, *(response(f"s{number}") for number in range(60)), segment_bytes=10)
        done.set()

    write(path, response("a"), response("b", ids=(8, 9)))
    writer = threading.Thread(target=fill)
    writer.start()
    reads = 0
    while not done.is_set():
        assert {name: row.output_ids for name, row in read_latest(path, ["b", "a"]).items()} == {
            "a": (5, 6, 7), "b": (8, 9),
        }  # fmt: skip
        reads += 1
    writer.join()
    assert reads and read_latest(path, ["c"]) == {}


CRASH_POINTS = ("open", "os.rename", "os.remove", "os.truncate")


def crash_at(step: int, action) -> bool:
    """Run ``action`` in a process that dies, as by SIGKILL, at its ``step``-th touch of a file; True where it did."""
    child = os.fork()
    if child == 0:
        steps = 0

        def die(event, arguments):
            nonlocal steps
            if event in CRASH_POINTS:
                steps += 1
                if steps == step:
                    os._exit(9)

        sys.addaudithook(die)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9


def test_a_crash_at_any_step_of_sealing_and_of_going_on_loses_nothing_and_doubles_nothing(tmp_path):
    template = tmp_path / "template"
    template.mkdir()
    write(template / "responses.jsonl", response("a"), response("b"))
    size = (template / "responses.jsonl").stat().st_size

    def write_on(path: Path) -> None:
        write(path, response("c"), segment_bytes=size + 1)

    crashes = 0
    for step in itertools.count(1):
        path = tmp_path / str(step) / "responses.jsonl"
        shutil.copytree(template, path.parent)
        crashed = crash_at(step, lambda path=path: write_on(path))
        crashes += crashed
        assert ids_in(path) in (["a", "b"], ["a", "b", "c"]), f"readers at step {step}"
        before = ids_in(path)
        crash_at(1 + step % 7, lambda path=path: write(path, segment_bytes=size + 1))
        assert ids_in(path) == before, f"readers after a second crash at step {step}"
        with ResponseLog(path, segment_bytes=size + 1) as log:
            assert [row.sample_id for row in log.take_rows()] == before
            assert not log.repaired.damaged and log.repaired.torn is None
        assert not list(path.parent.glob(".*")), "a temporary file was left"
        if "c" in before:
            assert len(log_files(path)) == 2 and path.stat().st_size == 0
        if not crashed:
            break
    assert crashes > 10


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("cut", ["flip", "truncate", "empty", "append", "garbage"])
def test_damage_in_a_sealed_segment_is_named_costs_only_what_it_hit_and_is_set_aside(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(response_log, "MEMBER_BYTES", 1)
    monkeypatch.setattr(response_log, "INFLATE_BYTES", 16)
    path = tmp_path / "responses.jsonl"
    write_segments(path, 4)
    segment = log_files(path)[0]
    data = segment.read_bytes()
    second = data.rindex(response_log.MEMBER_START)
    damaged, kept = {
        "flip": (data[: second // 2] + bytes([data[second // 2] ^ 4]) + data[second // 2 + 1 :], ["s1", "s2", "s3"]),
        "truncate": (data[: second + 20], ["s0", "s2", "s3"]),
        "empty": (b"", ["s2", "s3"]),
        "append": (data + b"more", ["s0", "s1", "s2", "s3"]),
        "garbage": (os.urandom(len(data)), ["s2", "s3"]),
    }[cut]
    segment.write_bytes(damaged)
    with pytest.raises(Failed, match=rf"{segment.name}: the row at byte \d+.*compressed bytes \d+ to \d+"):
        ids_in(path)
    log = write(path)
    assert log.repaired.damaged and all(damage.path == segment for damage in log.repaired.damaged)
    assert ids_in(path) == kept and [row.sample_id for row in log.take_rows()] == kept
    (aside,) = tmp_path.glob("*.corrupt")
    assert aside.read_bytes() == damaged
    assert not write(path).repaired.damaged


@pytest.mark.parametrize("hurt", ["missing", "torn", "flipped", "of another segment"])
def test_an_index_that_cannot_be_trusted_is_made_again(tmp_path, hurt):
    path = tmp_path / "responses.jsonl"
    write_segments(path, 4)
    indexes = sorted(tmp_path.glob("*.index.json.gz"))
    whole = indexes[0].read_bytes()
    if hurt == "missing":
        indexes[0].unlink()
    elif hurt == "torn":
        indexes[0].write_bytes(whole[:-30])
    elif hurt == "flipped":
        flip(indexes[0], len(whole) // 2)
    else:
        indexes[0].write_bytes(indexes[1].read_bytes())
    with ResponseLog(path) as log:
        assert [row.sample_id for row in log.take_rows()] == ["s0", "s1", "s2", "s3"]
    assert indexes[0].read_bytes() == whole


def test_a_segment_that_somebody_compressed_again_is_the_same_segment(tmp_path):
    path = tmp_path / "responses.jsonl"
    write_segments(path, 4)
    segment = log_files(path)[0]
    segment.write_bytes(gzip.compress(gzip.decompress(segment.read_bytes()), 9))
    log = write(path)
    assert not log.repaired.damaged and ids_in(path) == ["s0", "s1", "s2", "s3"]


def test_a_full_disk_while_sealing_is_worth_retrying_and_costs_no_row(tmp_path, monkeypatch):
    path = tmp_path / "responses.jsonl"

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, ResponseLog(path, segment_bytes=10) as log:
        patched.setattr(gzip, "compress", full)
        log.append(response("a"))
        with pytest.raises(Retryable, match="No space left"):
            log.sync()
    assert ids_in(path) == ["a"]
    write(path, response("b"), segment_bytes=10)
    assert ids_in(path) == ["a", "b"]
    assert [name for name in files_in(tmp_path) if name.endswith(".jsonl.gz")] == [
        "responses.000001.jsonl.gz",
        "responses.000002.jsonl.gz",
    ]


def test_lines_that_are_nothing_are_one_finding_however_many_they_are(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"), response("b"))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\n" * 1000 + second)
    (damage,) = write(path).repaired.damaged
    assert (damage.offset, damage.size, damage.lines) == (len(first), 1000, 1000)
    assert f"byte {len(first)} (and 999 more after it)" in str(damage)
    assert ids_in(path) == ["a", "b"]


def test_a_line_of_a_hundred_megabytes_is_set_aside_without_being_held_in_memory(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"), response("b"))
    first, second = path.read_bytes().splitlines(keepends=True)
    with path.open("wb") as file:
        file.write(first)
        file.seek(100_000_000, os.SEEK_CUR)
        file.write(b"\n" + second)
    with pytest.raises(Failed, match=rf"byte {len(first)}, 100000001 bytes long, is too long to be a row"):
        ids_in(path)
    (damage,) = write(path).repaired.damaged
    assert (damage.offset, damage.size) == (len(first), 100_000_001)
    assert ids_in(path) == ["a", "b"]


def test_a_tail_of_zeros_that_a_power_cut_left_is_cut(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"))
    whole = path.stat().st_size
    os.truncate(path, whole + 3_000_000)
    log = write(path, response("b"))
    assert (log.repaired.torn.offset, log.repaired.torn.size) == (whole, 3_000_000)
    assert ids_in(path) == ["a", "b"] and files_in(tmp_path) == ["responses.jsonl"]


def test_a_torn_tail_is_cut_on_a_disk_without_space_for_a_copy(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"))
    inode = path.stat().st_ino
    path.write_bytes(path.read_bytes() + b'{"sample_id":"b"')
    write(path)
    assert ids_in(path) == ["a"] and path.stat().st_ino == inode


def test_half_a_row_that_a_failing_disk_would_not_give_up_is_not_written_behind(tmp_path, monkeypatch):
    path = tmp_path / "responses.jsonl"
    log = ResponseLog(path)

    def failing(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    log.append(response("a"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        truncate, calls = os.ftruncate, iter((None, failing))
        patched.setattr(os, "ftruncate", lambda *given: (next(calls) or truncate)(*given))
        with pytest.raises(Retryable, match="Input/output error"):
            log.sync()
    log.append(response("b"))
    log.close()
    assert ids_in(path) == ["b"]
