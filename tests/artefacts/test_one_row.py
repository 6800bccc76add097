"""One row of a long response log."""

import json

import pytest

from aerie.artefacts.response_log import ResponseLog, find_row
from aerie.errors import Failed

from .test_response_log import response, write


def found(path, sample_id):
    line = find_row(path, sample_id)
    return None if line is None else json.loads(line)


def test_a_row_is_found_in_the_live_file_and_in_sealed_segments_as_it_stands_there(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, *(response(f"s{number}", ids=(number,) * 50) for number in range(40)), segment_bytes=3000)
    assert len(list(tmp_path.glob("*.gz"))) > 3 and path.stat().st_size
    for number in (0, 17, 39):
        row = found(path, f"s{number}")
        assert (row["sample_id"], row["output_ids"]) == (f"s{number}", [number] * 50)
    assert found(path, "s4x") is None and found(tmp_path / "none.jsonl", "s1") is None


def test_of_several_rows_that_of_the_highest_attempt_is_shown_wherever_it_lies(tmp_path):
    path = tmp_path / "responses.jsonl"
    rows = [response("a", attempt=2, ids=(2,)), response("b"), response("a", attempt=1, ids=(1,))]
    write(path, *rows, response('odd " name\n'))
    assert found(path, "a")["output_ids"] == [2]
    assert found(path, 'odd " name\n')["sample_id"] == 'odd " name\n'


def test_a_torn_tail_is_no_row_and_a_damaged_row_is_refused(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, response("a"), response("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert found(path, "b") is None and found(path, "a") is not None
    path.write_bytes(whole.replace(b"[5,6,7]", b"[5,6,8]", 1))
    with pytest.raises(Failed, match="does not match its checksum"):
        find_row(path, "a")


def test_a_sealed_segment_without_its_index_is_not_read_through(tmp_path):
    path = tmp_path / "responses.jsonl"
    with ResponseLog(path, segment_bytes=1000) as log:
        for number in range(20):
            log.append(response(f"s{number}", ids=(number,) * 50))
            log.sync()
    next(tmp_path.glob("*.index.json.gz")).unlink()
    with pytest.raises(Failed, match="has no index"):
        find_row(path, "s0")
