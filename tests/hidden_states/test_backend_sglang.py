"""The back end that captures in a server: it has one only for what is missing."""

import numpy as np
import pytest
import torch

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import state_name, state_path, write_states
from aerie.hidden_states import backend_sglang
from aerie.hidden_states.backend_sglang import ROWS_AT_ONCE, SglangBackend, next_missing
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.record import CaptureRecord

LAYERS = CapturedLayers(auxiliary=(1,), decoder_layers=3, hidden_size=4, dtype="bfloat16")


def rows(count):
    return [
        CorpusRow(
            row=i, sample_id=f"s{i}", dataset="B1", split="train", input_ids=np.array([i, i + 1], dtype=np.int32),
            loss_mask=np.array([0, 1], dtype=np.int8),
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def captured(tmp_path):
    """Rows that all have good states, and a record of them."""
    taken = []
    record = CaptureRecord(
        tmp_path, LAYERS, taken=lambda row, checked: taken.append(row.row), replaced=lambda reason: None,
        report=lambda progress: None, report_seconds=60.0,
    )  # fmt: skip
    all_rows = rows(2 * ROWS_AT_ONCE + 3)
    for row in all_rows:
        write_states(
            state_path(tmp_path, state_name(row.sample_id)),
            token_ids=torch.from_numpy(row.input_ids).long(),
            hidden_states=torch.ones(2, LAYERS.slots, 4, dtype=torch.bfloat16),
        )
    return all_rows, record, taken


def test_no_server_is_started_where_generation_has_left_every_state(captured, edition, monkeypatch):
    all_rows, record, taken = captured

    def started(*_):
        raise AssertionError("a server was started to capture nothing")

    monkeypatch.setattr(backend_sglang, "ensure_capture_server", started)
    SglangBackend(edition.request(), edition.events).capture(iter(all_rows), record)
    assert sorted(taken) == [row.row for row in all_rows]


def test_rows_that_are_there_are_taken_once_though_a_later_one_is_missing(captured):
    all_rows, record, taken = captured
    missing = all_rows[ROWS_AT_ONCE + 5]
    record.path_of(missing).unlink()
    left = iter(all_rows)
    assert [row.row for row in next_missing(left, record)] == [missing.row]
    assert sorted([*taken, missing.row]) == list(range(2 * ROWS_AT_ONCE))
    assert [row.row for row in left] == list(range(2 * ROWS_AT_ONCE, len(all_rows)))
