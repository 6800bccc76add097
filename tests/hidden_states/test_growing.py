"""The hook while a server generates: rows of prompts and of decode steps, asked for when a sample is kept."""

import json

import pytest
import torch

from aerie.artefacts.state_files import read_states, state_path
from aerie.hidden_states import server_hook
from aerie.hidden_states.growing import BLOCK_ROWS, ROW_OVERHEAD_BYTES, Growing
from aerie.hidden_states.protocol import (
    GeneratedRequest,
    failure_path,
    generated_key,
    hook_failure_path,
    parse_request_id,
)

from .test_server_hook import AUXILIARY, DEPTH, HIDDEN, VOCABULARY, Server

ROW_BYTES = (len(AUXILIARY) + 1) * HIDDEN * 4
BLOCK_BYTES = BLOCK_ROWS * (ROW_BYTES + ROW_OVERHEAD_BYTES)


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path, generated_bytes=1 << 20)


def key(name, attempt=1):
    return generated_key(name, f"main/B1:run:{attempt}")


def finish(server, ids, name, *, cached, attempt=1):
    """What the server computes for the request that asks for a sample: what its cache does not have."""
    request = GeneratedRequest(key(name, attempt), name, len(ids))
    server.extend((request.request_id, ids[cached:], cached))


def failure(server, name):
    return json.loads(failure_path(server.states, name).read_text())["reason"]


def decode(server, ids, name, *, first, attempt=1):
    """Decode steps that feed ``ids[first:-1]``: the last token is sampled and never fed."""
    for position in range(first, len(ids) - 1):
        server.decode((key(name, attempt), [ids[position]], position), ("warm-up", [7], position))


def test_a_kept_sample_has_every_row_though_its_last_token_was_never_decoded(server):
    ids = torch.randint(VOCABULARY, (3 * BLOCK_ROWS + 5,)).tolist()
    server.extend((key("a"), ids[:20], 0), ("warm-up", [7, 7], 0))
    server.extend((key("a"), ids[20:90], 20))
    decode(server, ids, "a", first=90)
    assert server.written() == []
    finish(server, ids, "a", cached=len(ids) - 1)
    server.check("a", ids)


def test_decoded_rows_among_the_prompts_of_others_are_taken(server):
    a, b = [3, 1, 4, 1, 5], [9, 2, 6]
    server.extend((key("a"), a[:2], 0))
    server.extend((key("b"), b[:2], 0), (key("a"), a[2:3], 2))
    server.decode((key("a"), a[3:4], 3))
    finish(server, a, "a", cached=4)
    finish(server, b, "b", cached=2)
    server.check("a", a)
    server.check("b", b)


def test_a_retracted_request_lands_on_the_same_rows(server):
    ids = list(range(10))
    server.extend((key("a"), ids[:4], 0))
    decode(server, [*ids[:6], 0], "a", first=4)
    server.extend((key("a"), ids[:6], 0))
    decode(server, ids, "a", first=6)
    finish(server, ids, "a", cached=9)
    server.check("a", ids)


def test_what_nobody_asks_for_leaves_no_file(server):
    server.extend((key("a"), [3, 1, 4], 0))
    server.decode((key("a"), [1], 3))
    assert list(server.states.iterdir()) == []


def test_a_sample_generated_again_replaces_the_states_of_its_first_response(server):
    first, second = [3, 1, 4, 1], [3, 1, 8, 8, 9]
    for attempt, ids in enumerate((first, second), start=1):
        server.extend((key("a", attempt), ids[:2], 0))
        decode(server, ids, "a", first=2, attempt=attempt)
        finish(server, ids, "a", cached=len(ids) - 1, attempt=attempt)
    server.check("a", second)


def test_a_row_from_the_cache_of_another_request_is_told_and_leaves_no_file(server):
    ids = [3, 1, 4, 1, 5]
    server.extend((key("a"), ids[2:4], 2))
    finish(server, ids, "a", cached=4)
    assert server.written() == []
    assert "0 of its 5 rows are there" in failure(server, "a")


def test_a_sample_that_the_cache_lost_is_computed_whole_when_it_is_asked_for(server):
    ids = [3, 1, 4, 1, 5]
    server.extend((GeneratedRequest(key("a"), "a", 5).request_id, ids[:3], 0))
    finish(server, ids, "a", cached=3)
    server.check("a", ids)


def test_a_server_that_captures_prompts_alone_takes_nothing_of_what_is_generated(tmp_path):
    server = Server(tmp_path)
    ids = [3, 1, 4]
    server.extend((key("a"), ids[:2], 0))
    server.decode((key("a"), ids[2:], 2))
    finish(server, ids, "a", cached=2)
    assert list(tmp_path.iterdir()) == []


def test_states_are_stored_in_the_type_asked_for(tmp_path):
    server = Server(tmp_path, dtype="bfloat16", generated_bytes=1 << 20)
    server.extend((key("a"), [3, 1], 0))
    finish(server, [3, 1, 4], "a", cached=2)
    state = read_states(state_path(tmp_path, "a"))
    expected = server.model["model"].expected([3, 1, 4])
    assert torch.equal(state.hidden_states, expected.to(torch.bfloat16))


def test_a_norm_that_never_fires_is_told_once_and_not_in_every_step(tmp_path):
    server = Server(tmp_path, layers=(1, 2, DEPTH + 3), generated_bytes=1 << 20)
    server.extend((key("a"), [3, 1], 0), (key("b"), [4], 0))
    server.decode((key("a"), [5], 2), (key("b"), [5], 1))
    assert [path.name for path in tmp_path.iterdir()] == [hook_failure_path(tmp_path).name]


def test_a_disk_that_refuses_does_not_stop_the_server(server, monkeypatch):
    def refuse(path, document):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(server_hook, "write_json", refuse)
    monkeypatch.setattr(server_hook, "state_path", lambda states, name: states / "missing" / "folder" / name)
    (server.states / "missing").write_text("a file, where a folder is needed")
    server.extend((key("a"), [3, 1], 0))
    finish(server, [3, 1, 4], "a", cached=2)
    monkeypatch.undo()
    server.extend((key("b"), [3, 1], 0))
    finish(server, [3, 1, 4], "b", cached=2)
    server.check("b", [3, 1, 4])


def test_memory_is_bounded_and_what_got_no_row_for_longest_goes_first(tmp_path):
    server = Server(tmp_path, generated_bytes=2 * BLOCK_BYTES)
    kept, left = [3, 1, 4, 1], [9, 2, 6]
    server.extend((key("left"), left[:2], 0))
    server.extend((key("kept"), kept[:2], 0))
    server.decode((key("kept"), kept[2:3], 2))
    server.extend((key("new"), [8, 8], 0))
    finish(server, kept, "kept", cached=3)
    server.check("kept", kept)
    finish(server, left, "left", cached=2)
    assert "dropped for want of memory (1 requests were" in failure(server, "left")
    finish(server, [8, 8, 8], "new", cached=2)
    server.check("new", [8, 8, 8])


def test_a_request_larger_than_the_memory_is_dropped_and_does_not_take_that_of_others_again(tmp_path):
    server = Server(tmp_path, generated_bytes=2 * BLOCK_BYTES)
    ids = [1] * (3 * BLOCK_ROWS)
    server.extend((key("long"), ids[:-1], 0))
    server.extend((key("a"), [3, 1], 0))
    decode(server, [*ids, 1, 1], "long", first=len(ids) - 1)
    finish(server, [3, 1, 4], "a", cached=2)
    server.check("a", [3, 1, 4])
    finish(server, [*ids, 1, 1], "long", cached=len(ids) + 1)
    assert server.written() == ["a"]


def test_memory_is_given_back_as_samples_are_taken():
    growing = Growing(1 << 30)
    rows = torch.zeros(2 * BLOCK_ROWS, 4, dtype=torch.uint8).numpy()
    ids = torch.zeros(2 * BLOCK_ROWS, dtype=torch.int64).numpy()
    for name in ("a", "b"):
        growing.add(name, 0, ids, rows)
    assert growing.held_bytes == 4 * BLOCK_ROWS * (4 + ROW_OVERHEAD_BYTES)
    growing.take("a", 7)
    growing.take("b", len(ids))
    assert growing.held_bytes == 0


def test_request_ids_carry_a_name_and_the_request_that_generated_it():
    asked = GeneratedRequest(key("B1%2Fx-3"), "B1%2Fx-3", 17)
    assert parse_request_id(asked.request_id) == asked
    assert parse_request_id(asked.key) == GeneratedRequest(asked.key, "B1%2Fx-3")
