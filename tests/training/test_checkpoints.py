import json
import os

import pytest
import torch

from aerie.errors import Failed
from aerie.training.checkpoints import (
    BatchPlan,
    Progress,
    adopt_interrupted,
    best_checkpoint,
    is_finished,
    latest_progress,
    remove_cut_off,
    repeat_cut_validation,
)

PLAN = BatchPlan(lengths=[10] * 40, sequence_length=40, processes=1, seed=0)
STEPS = 10  # an epoch, at four rows a batch


def epoch(checkpoints, number, local_step=0, global_step=0, whole=True):
    folder = checkpoints / str(number)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    if whole:
        state = {"epoch": number, "local_step": local_step, "global_step": global_step}
        (folder / "training_state.json").write_text(json.dumps(state))
    return folder


def interrupted(checkpoints, global_step):
    folder = checkpoints / "interrupted"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"newer weights")
    torch.save([{"last_epoch": global_step, "base_lrs": [1.0]}], folder / "scheduler_state_dict.pt")
    return folder


def test_a_checkpoint_that_a_kill_cut_off_is_not_resumed_from(tmp_path):
    epoch(tmp_path, 0, global_step=STEPS)
    epoch(tmp_path, 1, whole=False)
    assert remove_cut_off(tmp_path) == ["1"]
    assert latest_progress(tmp_path) == Progress(epoch=0, local_step=0, global_step=STEPS)


def test_an_epochs_end_that_a_kill_cut_off_over_its_middle_is_not_resumed_from(tmp_path):
    epoch(tmp_path, 0, global_step=STEPS)
    half = epoch(tmp_path, 1, local_step=4, global_step=STEPS + 4)
    (half / "val_metrics.json").write_text("{}")  # comes after
    os.utime(half / "val_metrics.json", ns=(0, (half / "training_state.json").stat().st_mtime_ns + 10))
    assert remove_cut_off(tmp_path) == []
    os.utime(half / "model.safetensors", ns=(0, (half / "training_state.json").stat().st_mtime_ns + 1))
    assert remove_cut_off(tmp_path) == ["1"]
    torn = epoch(tmp_path, 1, global_step=2 * STEPS)
    (torn / "training_state.json").write_text('{"epoch": 1, "loc')
    assert remove_cut_off(tmp_path) == ["1"]
    assert latest_progress(tmp_path) == Progress(epoch=0, local_step=0, global_step=STEPS)


def test_an_epoch_that_was_ended_before_its_validation_is_validated_first(tmp_path):
    epoch(tmp_path, 0, global_step=STEPS)
    epoch(tmp_path, 1, global_step=2 * STEPS)
    assert repeat_cut_validation(tmp_path, PLAN, {0, 1}) is None
    assert repeat_cut_validation(tmp_path, PLAN, {0}) == 1
    assert latest_progress(tmp_path) == Progress(epoch=1, local_step=STEPS, global_step=2 * STEPS)
    assert not is_finished(tmp_path, 2)
    assert remove_cut_off(tmp_path) == []


def test_an_interrupted_state_becomes_the_checkpoint_that_speculators_resumes_from(tmp_path):
    epoch(tmp_path, 0, global_step=STEPS)
    interrupted(tmp_path, STEPS + 4)
    assert adopt_interrupted(tmp_path, PLAN) == Progress(epoch=1, local_step=4, global_step=STEPS + 4)
    assert (tmp_path / "1/model.safetensors").read_bytes() == b"newer weights"
    assert latest_progress(tmp_path) == Progress(epoch=1, local_step=4, global_step=STEPS + 4)
    assert not (tmp_path / "interrupted").exists()


def test_an_interruption_during_validation_does_not_replace_the_finished_epoch(tmp_path):
    epoch(tmp_path, 0, global_step=STEPS)
    interrupted(tmp_path, STEPS)
    assert adopt_interrupted(tmp_path, PLAN) is None
    assert (tmp_path / "0/model.safetensors").read_bytes() == b"weights"


def test_an_interruption_before_the_epochs_checkpoint_still_finishes_the_epoch(tmp_path):
    interrupted(tmp_path, STEPS)
    assert adopt_interrupted(tmp_path, PLAN) == Progress(epoch=0, local_step=0, global_step=STEPS)
    assert is_finished(tmp_path, 1)


@pytest.mark.parametrize("broken", ["missing", "torn", "no_step"])
def test_an_interrupted_state_that_is_not_whole_is_dropped(tmp_path, broken):
    state = interrupted(tmp_path, 0 if broken == "no_step" else 4) / "scheduler_state_dict.pt"
    if broken == "missing":
        state.unlink()
    elif broken == "torn":
        state.write_bytes(state.read_bytes()[:200])
    assert adopt_interrupted(tmp_path, PLAN) is None
    assert list(tmp_path.iterdir()) == []


def test_success_is_the_last_epoch_finished_and_not_half_of_it(tmp_path):
    epoch(tmp_path, 0, global_step=STEPS)
    epoch(tmp_path, 1, local_step=4, global_step=STEPS + 4)
    assert not is_finished(tmp_path, 2)
    with pytest.raises(Failed, match="epoch 2 of 2"):
        best_checkpoint(tmp_path, 2)


def test_the_checkpoint_with_the_lowest_validation_loss_is_exported(tmp_path):
    for number in range(3):
        epoch(tmp_path, number, global_step=STEPS)
    assert best_checkpoint(tmp_path, 3).name == "2"
    (tmp_path / "checkpoint_best").symlink_to("1")
    assert best_checkpoint(tmp_path, 3).name == "1"
