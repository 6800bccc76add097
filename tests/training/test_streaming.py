"""Streaming under a disk limit: what the trainer reads, what lies on the disk, and how either end tells the other."""

import contextlib
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from speculators.train import graceful_shutdown, trainer
from speculators.train.recovery import RECOVERY_METADATA_KEY, RecoveryMetadata, SampleUnavailable

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRows, iterate_rows
from aerie.artefacts.state_files import link_path, state_name, state_path, write_states
from aerie.artefacts.state_stream import Stream, end_stream, open_stream
from aerie.errors import Failed, Retryable
from aerie.hidden_states.check import check_state_file
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.streaming import file_bytes
from aerie.processes import ProcessIdentity
from aerie.training import stage
from aerie.training.checkpoints import BatchPlan
from aerie.training.stream_order import StreamOrder
from aerie.training.streamed_states import StreamedStates, save_where_states_end
from aerie.training.streaming import StateStream, StreamPlan
from aerie.training.trainer_process import run_trainer

LAYERS = CapturedLayers(auxiliary=(2, 4, 5), decoder_layers=8, hidden_size=8, dtype="float32")
SEQUENCE = 64
TRAIN_ROWS, ROWS, EPOCHS = 60, 70, 2
ONE_STEP = file_bytes(SEQUENCE, LAYERS)
ONE = (1.0,) * 4


@pytest.fixture
def corpus(edition):
    random = np.random.default_rng(3)
    ids = [random.integers(2, 40, size=int(random.integers(8, 40))).tolist() for _ in range(ROWS)]
    edition.merge(ids, train_rows=TRAIN_ROWS)
    edition.files.states.mkdir(parents=True)
    return SimpleNamespace(files=edition.files, ids=ids, lengths=[len(row) for row in ids])


def plan(corpus, *, limit_bytes=2 * ONE_STEP, wait_seconds=60.0, medians=ONE):
    order = StreamOrder(
        train=BatchPlan(corpus.lengths[:TRAIN_ROWS], SEQUENCE, 1, 7),
        validation=BatchPlan(corpus.lengths[TRAIN_ROWS:], SEQUENCE, 1, 0),
        epochs=EPOCHS,
    )
    return StreamPlan(
        files=corpus.files, layers=LAYERS, order=order, after=None, limit_bytes=limit_bytes, medians=medians,
        wait_seconds=wait_seconds,
    )  # fmt: skip


class Server:
    """Stands in for the capturing server: writes the states of each row, which are its number; can fail or lie."""

    def __init__(self, corpus):
        self.files = corpus.files
        self.captured, self.failure, self.scale, self.fails_at = [], None, 1.0, None

    def __call__(self, rows, taken):
        for row in rows:
            if self.failure is not None and len(self.captured) == self.fails_at:
                raise self.failure
            path = state_path(self.files.states, state_name(row.sample_id))
            states = torch.full((len(row.input_ids), 4, 8), self.scale)
            states[:, :, 0] = 1 + row.row / 1000
            write_states(path, token_ids=torch.tensor(row.input_ids, dtype=torch.int64), hidden_states=states)
            self.captured.append(row.row)
            taken(row, check_state_file(path, row.input_ids, LAYERS))


class Disk:
    """Watches how many bytes state files take, from another thread, as fast as it can."""

    def __init__(self, folder):
        self.folder, self.most, self._stop = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def bytes(self):
        total = 0
        for path in self.folder.rglob("*safetensors*"):
            with contextlib.suppress(FileNotFoundError):  # read meanwhile
                total += path.stat().st_blocks * 512
        return total

    def _watch(self):
        while not self._stop.wait(0.002):
            self.most = max(self.most, self.bytes())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def read_everything(corpus, transfer, *, workers):
    """Read as a data loader with ``workers`` does, each its own batches."""
    order, read = plan(corpus).order, {}

    def batches(packing, epoch, offset):
        return [[offset + int(row) for row in batch] for batch in packing._batches(epoch, rank=0)]

    def work(share, epoch):
        for batch in share:
            for row in batch:
                state = transfer.get_cached(row)
                assert not isinstance(state, SampleUnavailable), state.reason
                read[epoch, row] = state

    for epoch in range(EPOCHS):
        for loader in (batches(order.train, epoch, 0), batches(order.validation, epoch, TRAIN_ROWS)):
            threads = [
                threading.Thread(target=work, args=(loader[worker::workers], epoch), daemon=True)
                for worker in range(workers)
            ]
            [thread.start() for thread in threads]
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive(), "the trainer waits for a row that does not come"
    return read


@pytest.mark.parametrize("workers", [1, 5])
def test_every_row_of_every_epoch_is_read_once_and_right_while_the_disk_limit_holds(corpus, workers):
    server, limit = Server(corpus), 2 * ONE_STEP
    everything = sum(file_bytes(length, LAYERS) for length in corpus.lengths)
    assert limit < everything / 10
    with Disk(corpus.files.hidden_states) as disk, StateStream(plan(corpus), server, lambda _: None) as stream:
        read = read_everything(corpus, StreamedStates(corpus.files.hidden_states), workers=workers)
    assert stream.failure is None
    assert len(read) == EPOCHS * ROWS
    for (_, row), state in read.items():
        assert state["token_ids"].tolist() == corpus.ids[row]
        assert state["hidden_states"][0, 0, 0] == pytest.approx(1 + row / 1000)
    assert 0 < disk.most <= limit
    assert disk.most <= stream.so_far.peak_bytes <= limit
    assert stream.so_far.rows == EPOCHS * ROWS
    assert disk.bytes() == 0


def test_states_that_a_crash_left_are_removed_before_the_first_is_captured_so_that_the_limit_holds(corpus):
    server = Server(corpus)
    for row in iterate_rows(corpus.files.corpus / DATASET_FOLDER):  # the whole corpus: ten times the limit
        tokens = torch.tensor(row.input_ids, dtype=torch.int64)
        for path in (state_path(corpus.files.states, f"x{row.row}"), link_path(corpus.files.hidden_states, row.row)):
            write_states(path, token_ids=tokens.flip(0), hidden_states=torch.zeros(len(tokens), 4, 8))
    end_stream(corpus.files.hidden_states, "of the crash")
    with StateStream(plan(corpus), server, lambda _: None), Disk(corpus.files.hidden_states) as disk:
        read = read_everything(corpus, StreamedStates(corpus.files.hidden_states), workers=1)
    assert len(read) == EPOCHS * ROWS
    assert disk.most <= 2 * ONE_STEP


@pytest.mark.parametrize("failure", [Retryable("the server stopped answering"), Failed("row 7 has a NaN")])
def test_a_capture_that_fails_reaches_the_trainer_with_its_reason_instead_of_letting_it_wait(corpus, failure):
    server = Server(corpus)
    server.failure, server.fails_at = failure, 9
    transfer = StreamedStates(corpus.files.hidden_states)
    with StateStream(plan(corpus), server, lambda _: None) as stream:
        uses = [use.row for use in plan(corpus).order.uses(None)]
        outcomes = [transfer.get_cached(row) for row in uses[:10]]
    assert [isinstance(outcome, SampleUnavailable) for outcome in outcomes] == [False] * 9 + [True]
    assert (outcomes[9].fatal, outcomes[9].reason) == (True, str(failure))
    assert stream.failure is failure


def test_states_of_another_magnitude_than_the_proven_sample_end_the_stream(corpus):
    server = Server(corpus)
    server.scale = 100.0
    with StateStream(plan(corpus), server, lambda _: None) as stream:
        outcome = StreamedStates(corpus.files.hidden_states).get_cached(next(plan(corpus).order.uses(None)).row)
    assert "far from those of the proven sample" in outcome.reason
    assert isinstance(stream.failure, Failed)


def test_a_stage_that_was_killed_is_noticed_by_the_trainer_that_waits(corpus):
    stage = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stream = Stream(producer=ProcessIdentity.of(stage.pid), wait_seconds=600)
    open_stream(corpus.files.hidden_states, corpus.files.states, stream)
    stage.kill()
    stage.wait()
    outcome = StreamedStates(corpus.files.hidden_states).get_cached(0)
    assert outcome.fatal
    assert f"process {stage.pid}" in outcome.reason


def test_a_worker_that_outlived_its_trainer_takes_no_row_of_the_next_one(corpus, monkeypatch):
    with StateStream(plan(corpus), Server(corpus), lambda _: None):
        first, second, *_ = (use.row for use in plan(corpus).order.uses(None))
        worker = StreamedStates(corpus.files.hidden_states)
        assert not isinstance(worker.get_cached(first), SampleUnavailable)
        monkeypatch.setattr("os.getppid", lambda: 0)  # nobody has this one
        assert worker.get_cached(second).fatal
        monkeypatch.undo()
        assert not isinstance(StreamedStates(corpus.files.hidden_states).get_cached(second), SampleUnavailable)


def test_a_row_asked_for_out_of_turn_fails_after_a_bounded_wait(corpus):
    server = Server(corpus)
    transfer = StreamedStates(corpus.files.hidden_states)
    last = list(plan(corpus).order.uses(None))[TRAIN_ROWS - 1].row
    with (
        StateStream(plan(corpus, wait_seconds=1.5), server, lambda _: None),
        pytest.raises(Failed, match=rf"row {last} were not captured within 2 s.*another order"),
    ):
        transfer.get_cached(last)


def test_states_without_a_stage_that_captures_them_are_refused(corpus):
    with pytest.raises(Failed, match="train through the stage"):
        StreamedStates(corpus.files.hidden_states).get_cached(0)


def test_a_batch_whose_states_will_not_come_is_saved_before_and_not_trained_on(monkeypatch, capfd):
    monkeypatch.setattr(trainer, "BatchRecoveryCoordinator", trainer.BatchRecoveryCoordinator)
    save_where_states_end()
    recovery = trainer.BatchRecoveryCoordinator("training")
    recovery.consume({})
    lost = RecoveryMetadata(failure_count=1, locally_empty=True, fatal=True, error="the server stopped answering")
    with pytest.raises(graceful_shutdown.TrainingInterruptedError):
        recovery.consume({RECOVERY_METADATA_KEY: lost})
    assert "the server stopped answering" in capfd.readouterr().err


def test_rows_by_position_are_those_of_the_corpus_in_order(corpus):
    folder = corpus.files.corpus / DATASET_FOLDER
    rows = CorpusRows(folder)
    for row in iterate_rows(folder):
        found = rows[row.row]
        assert (found.sample_id, found.split) == (row.sample_id, row.split)
        assert np.array_equal(found.input_ids, row.input_ids)
        assert np.array_equal(found.loss_mask, row.loss_mask)


HANGS_AFTER_SOME_ROWS = """
import sys, time
from pathlib import Path
for name in sys.argv[1:]:
    while not Path(name).exists():
        time.sleep(0.02)
    Path(name).unlink()
def hangs_by_itself():
    print("took its rows", flush=True)
    time.sleep(600)
hangs_by_itself()
"""


@pytest.mark.timeout(120)
def test_a_trainer_that_hangs_over_streamed_states_is_ended_and_the_capture_does_not_wait_for_it_for_ever(
    corpus, tmp_path
):
    order = plan(corpus).order.uses(None)
    rows = [str(link_path(corpus.files.hidden_states, next(order).row)) for _ in range(5)]
    log = tmp_path / "train.log"
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        with (
            pytest.raises(Failed, match=r"made no step for .*training\.stall_minutes") as raised,
            StateStream(plan(corpus), Server(corpus), lambda _: None) as stream,
        ):
            run_trainer(
                [sys.executable, "-c", HANGS_AFTER_SOME_ROWS, *rows],
                log=log, lock=lock, on_step=lambda _: None, on_validation=lambda _: None, stall_seconds=1.0,
                fed_since=lambda: stream.waiting_since if b"took its rows" in log.read_bytes() else None,
            )  # fmt: skip
    finally:
        os.close(lock)
    assert "in hangs_by_itself" in str(raised.value)
    assert stream.failure is None and stream.so_far.rows >= 5


@pytest.mark.parametrize("lost", [Retryable("the server died"), None])
def test_a_trainer_that_hangs_after_the_capture_failed_is_told_of_as_the_capture_s_failure(monkeypatch, lost):
    def hangs(*_, **__):
        raise Failed("the trainer made no step")

    prepared = SimpleNamespace(
        trainer=SimpleNamespace(streamed=True, checkpoints=Path()), corpus=None, captured=None, layers=None, order=None
    )
    monkeypatch.setattr(stage, "trainer_gpus", lambda *_, **__: None)
    monkeypatch.setattr(stage, "streamed_states", lambda *_: nullcontext(SimpleNamespace(failure=lost)))
    monkeypatch.setattr(stage, "run_on", hangs)
    with pytest.raises(Failed if lost is None else Retryable, match=str(lost or "made no step")):
        stage.run(None, prepared, None, 0)


def test_while_rows_are_captured_that_the_trainer_may_wait_for_the_capture_does_not_say_that_it_waits(corpus):
    server, seen = Server(corpus), []

    def capture(rows, taken):
        def watched(row, checked):
            seen.append(stream.waiting_since)
            taken(row, checked)

        server(rows, watched)

    with StateStream(plan(corpus), capture, lambda _: None) as stream:
        read_everything(corpus, StreamedStates(corpus.files.hidden_states), workers=1)
        stream._thread.join(60)
        assert stream.waiting_since is not None, "all was captured: what is left is the trainer's own time"
    assert len(seen) == EPOCHS * ROWS and set(seen) == {None}
