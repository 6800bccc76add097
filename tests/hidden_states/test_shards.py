"""A capture that ranks share: each row once, nothing taken for done that is not, ranks side by side."""

import pytest
from pydantic import ValidationError

from aerie.artefacts.state_index import shard_index
from aerie.errors import BadInput, Busy, Failed
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.shards import rows_of_rank
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify
from aerie.stages import STAGES

from .conftest import random_rows

WORLD = 3
ROWS = 10


def asked(rank=None, **fields):
    return {"backend": "transformers", "world_size": WORLD, "rank": rank, "parity_rows": 1, **fields}


@pytest.fixture
def shared(edition):
    edition.merged(random_rows(ROWS, longest=40))
    forecast(edition.request(hidden_states=asked()), edition.events)
    return edition


def run(shared, rank=None):
    return capture(shared.request(hidden_states=asked(rank)), shared.events)


def test_ranks_capture_their_rows_and_their_files_are_taken_together_without_a_model(shared, monkeypatch):
    results = [run(shared, rank) for rank in (2, 0, 1)]
    assert sorted(result.data["rows"] for result in results) == [3, 3, 4]
    assert not shared.files.manifest("capture").exists()

    def touched(*_):
        raise AssertionError("a back end was asked")

    monkeypatch.setattr("aerie.hidden_states.capturing.backend_of", touched)
    result = run(shared)
    assert (result.manifest.counts["files"], result.reused) == (ROWS, False)
    assert (
        verify(shared.files, resolve_layers(shared.request().settings), shared.events, progress_seconds=60).rows == ROWS
    )
    assert run(shared).reused


def test_a_forced_rank_is_told_the_one_way_to_capture_anew_and_it_works(shared):
    for rank in range(WORLD):
        run(shared, rank)
    with pytest.raises(BadInput, match=r"run capture --world-size 3 --force once, .* then each rank without --force"):
        capture(shared.request(hidden_states=asked(0), force=True), shared.events)
    other = asked(layers=[1, 2, 3])
    forecast(shared.request(hidden_states=other), shared.events)
    with pytest.raises(Failed, match=r"capture with --force \(and without --rank\) to discard them"):
        capture(shared.request(hidden_states={**other, "rank": 0}), shared.events)
    with pytest.raises(BadInput, match="ranks 0, 1, 2 of 3 have not captured yet"):
        capture(shared.request(hidden_states=other, force=True), shared.events)
    assert not list(shared.states.iterdir())
    for rank in range(WORLD):
        capture(shared.request(hidden_states={**other, "rank": rank}), shared.events)
    again = capture(shared.request(hidden_states=other, force=True), shared.events)
    assert again.manifest.counts["files"] == ROWS, "a retry of the forced run threw away what the ranks captured"


def test_a_rank_that_has_not_captured_is_named(shared):
    run(shared, 1)
    with pytest.raises(BadInput, match="ranks 0, 2 of 3 have not captured yet"):
        run(shared)


def test_a_file_that_is_gone_or_a_row_of_another_corpus_is_not_taken_for_captured(shared):
    for rank in range(WORLD):
        run(shared, rank)
    next(shared.states.glob("*.safetensors")).unlink()
    with pytest.raises(Failed, match=r"what 3 ranks captured is not this corpus: row \d: states/B1.* is not there"):
        run(shared)
    shared.merged([*random_rows(ROWS, longest=40)[1:], [5, 6, 7]])
    forecast(shared.request(hidden_states=asked()), shared.events)
    with pytest.raises(Failed, match=r"row 0 \(sample B1/0\) was captured as sample B1/0 of other tokens"):
        run(shared)


def test_a_row_that_two_ranks_claim_is_found(shared):
    for rank in range(WORLD):
        run(shared, rank)
    folder = shared.files.hidden_states
    shard_index(folder, 2, WORLD).write_bytes(shard_index(folder, 1, WORLD).read_bytes())
    with pytest.raises(Failed, match=r"row 4 is in two indexes.*row 7 \(sample B1/7\) was captured by no rank"):
        run(shared)


@pytest.mark.parametrize(("rows", "world"), [(10, 3), (2, 5), (0, 2), (1000, 7)])
def test_every_row_is_of_one_rank(rows, world):
    shares = [rows_of_rank(rows, rank=rank, world_size=world) for rank in range(world)]
    assert [row for share in shares for row in share] == list(range(rows))


def test_ranks_work_side_by_side_but_not_one_twice_nor_beside_the_whole(shared):
    stage = STAGES["capture"]
    with stage.alone(shared.request(hidden_states=asked(0))):
        with stage.alone(shared.request(hidden_states=asked(1))):
            pass
        with (
            pytest.raises(Busy, match="rank 0 of 3 of the capture of edition main is being worked on"),
            stage.alone(shared.request(hidden_states=asked(0))),
        ):
            pass
        with (
            pytest.raises(Busy, match="edition main is being worked on"),
            stage.alone(shared.request(hidden_states=asked())),
        ):
            pass


@pytest.mark.parametrize("fields", [{"rank": 3}, {"world_size": 2, "disk_limit_gib": 1.0}])
def test_a_rank_out_of_the_world_or_of_streamed_states_is_refused(edition, fields):
    with pytest.raises(ValidationError, match=r"expected 0 to 2|not shared out"):
        edition.request(hidden_states={"world_size": 3, **fields})
