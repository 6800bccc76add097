"""State files stored as fp8: half the bytes, an error that is told, and what speculators' own back end reads."""

import pytest
import torch
from hs_connectors import FP8Backend, FP8Transfer
from pydantic import ValidationError
from speculators.train.data import ArrowDataset

from aerie.artefacts.state_files import read_states, state_path, write_states
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify

from .conftest import random_rows

FP8 = {"backend": "transformers", "dtype": "bfloat16", "storage": "fp8", "parity_rows": 4}


@pytest.fixture
def captured(edition):
    edition.merged(random_rows(12, longest=60))
    edition.counts = {}
    for name, asked in (("plain", {**FP8, "storage": "plain"}), ("fp8", FP8)):
        request = edition.request(hidden_states=asked, force=True)
        edition.counts[name] = (forecast(request, edition.events), capture(request, edition.events).manifest.counts)
    return edition


def test_fp8_halves_the_bytes_tells_its_error_and_is_what_the_trainer_s_own_back_end_reads(captured):
    (predicted, counts), (_, plain) = captured.counts["fp8"], captured.counts["plain"]
    assert counts["bytes"] < 0.55 * plain["bytes"]
    assert predicted.manifest.counts["bytes_per_token"] == 4 * 64 + 4
    assert plain["fp8_errors"] is None
    assert all(0.005 < error < 0.08 for error in counts["fp8_errors"]["mean"])
    assert counts["fp8_errors"]["mean"] <= counts["fp8_errors"]["maximum"]
    assert 0.005 < counts["parity"]["maximum_relative"] < counts["parity"]["tolerance"] == 0.08

    layers = resolve_layers(captured.request(hidden_states=FP8).settings)
    assert verify(captured.files, layers, captured.events, progress_seconds=60).rows == 12
    ours = read_states(captured.files.hidden_states / "hs_3.safetensors")
    theirs = FP8Transfer(captured.files.hidden_states).get_cached(3)
    assert torch.equal(ours.hidden_states, theirs["hidden_states"])
    transfer = FP8Backend.from_train_args(
        type("Arguments", (), {"hidden_states_path": str(captured.files.hidden_states)}), ""
    )
    data = ArrowDataset(256, str(captured.files.corpus / "dataset"), transfer=transfer, on_missing="raise")
    assert data[3]["hidden_states"].shape == (len(ours.token_ids), 3 * 64)


def test_a_plain_file_that_an_interrupted_run_left_is_stored_as_fp8_instead_of_captured_again(captured):
    path = state_path(captured.states, "B1%2F3")
    fp8 = read_states(path)
    write_states(path, token_ids=fp8.token_ids, hidden_states=fp8.hidden_states)
    counts = capture(captured.request(hidden_states=FP8, force=True), captured.events).manifest.counts
    assert counts["captured_tokens"] == 0
    assert read_states(path).stored == "fp8"


def test_what_fp8_cost_is_told_by_a_capture_that_goes_on_behind_its_last_file_and_by_one_of_ranks(captured):
    _, first = captured.counts["fp8"]
    assert first["fp8_errors"]["files"] == 12
    captured.files.manifest("capture").unlink()
    again = capture(captured.request(hidden_states=FP8), captured.events).manifest.counts
    assert (again["captured_tokens"], again["fp8_errors"]) == (0, first["fp8_errors"])
    for rank in (0, 1):
        capture(captured.request(hidden_states={**FP8, "world_size": 2, "rank": rank}), captured.events)
    captured.files.manifest("capture").unlink()
    merged = capture(captured.request(hidden_states={**FP8, "world_size": 2}), captured.events).manifest.counts
    assert merged["fp8_errors"] == first["fp8_errors"]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [({"dtype": "float32"}, "expected bfloat16"), ({"dtype": "bfloat16", "disk_limit_gib": 1}, "are stored plain")],
)
def test_fp8_of_what_the_trainer_is_not_handed_so_is_refused(edition, asked, problem):
    with pytest.raises(ValidationError, match=problem):
        edition.request(hidden_states={"storage": "fp8", **asked})
