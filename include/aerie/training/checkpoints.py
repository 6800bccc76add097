"""The trainer's checkpoint folder: which epochs are finished, what an interrupted run left, which checkpoint is best.

speculators writes ``<epoch>/training_state.json`` after everything else of a checkpoint, so a folder without it was cut
off by a kill; so was one whose other files are newer, because the end of an epoch is written over its middle. On
SIGTERM it saves ``interrupted/``, exits with 0, and its next run ignores that folder; but it does resume from the
middle of an epoch when a folder named after the epoch says how many steps were made. ``adopt_interrupted`` turns the
one into the other: the number of steps made is the scheduler's, that of an epoch the sampler's.
"""

import json
import shutil
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

from aerie.artefacts.files import write_json
from aerie.errors import Failed

INTERRUPTED = "interrupted"
TRAINING_STATE = "training_state.json"
VALIDATION_METRICS = "val_metrics.json"
SCHEDULER_STATE = "scheduler_state_dict.pt"
WRITTEN_BEFORE = ("model.safetensors", "optimizer_state_dict.pt", SCHEDULER_STATE)
BEST = "checkpoint_best"
CHECKPOINT_FILES = ("config.json", "model.safetensors")
"""What a drafter is."""


@dataclass(frozen=True)
class Progress:
    """Steps made: ``local_step`` of ``epoch`` (0: the epoch is finished), ``global_step`` in all."""

    epoch: int
    local_step: int
    global_step: int


@dataclass(frozen=True)
class BatchPlan:
    """What decides an epoch's steps and their rows: the rows' lengths in tokens, and how they are packed."""

    lengths: Sequence[int]
    sequence_length: int
    processes: int
    seed: int

    def steps(self, epoch: int) -> int:
        """Steps of ``epoch``, by speculators' own packing."""
        return len(self._batches(epoch, rank=0))

    def rows(self, epoch: int, *, after_step: int) -> Iterator[int]:
        """Yield the rows of ``epoch`` behind its first ``after_step`` steps: step by step, rank by rank."""
        ranks = [self._batches(epoch, rank=rank)[after_step:] for rank in range(self.processes)]
        for step in zip(*ranks, strict=True):
            for batch in step:
                yield from map(int, batch)

    def _batches(self, epoch: int, *, rank: int) -> list[Any]:
        sampler = MultipackDistributedBatchSamplerV2(
            batch_max_length=self.sequence_length,
            lengths=list(self.lengths),
            num_replicas=self.processes,
            rank=rank,
            seed=self.seed,
        )
        sampler.set_epoch(epoch)
        return list(sampler)


def epoch_folders(checkpoints: Path) -> list[Path]:
    """Folders named after an epoch, in order."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name))


def remove_cut_off(checkpoints: Path) -> list[str]:
    """Remove checkpoints that a kill left half-written, and return their names."""
    cut_off = [path for path in epoch_folders(checkpoints) if _is_cut_off(path)]
    for path in cut_off:
        shutil.rmtree(path)
    return [path.name for path in cut_off]


def _is_cut_off(folder: Path) -> bool:
    """Whether a checkpoint is not whole, or was being written over: its training state, written last, is the older."""
    state = folder / TRAINING_STATE
    try:
        read_progress(folder)
    except (FileNotFoundError, json.JSONDecodeError):
        return True
    written = state.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > written for name in WRITTEN_BEFORE if (path := folder / name).is_file())


def read_progress(folder: Path) -> Progress:
    """Progress that the checkpoint in ``folder`` records."""
    return Progress(**json.loads((folder / TRAINING_STATE).read_text(encoding="utf-8")))


def latest_progress(checkpoints: Path) -> Progress | None:
    """Progress of the newest checkpoint, None when there is none."""
    folders = epoch_folders(checkpoints)
    return read_progress(folders[-1]) if folders else None


def repeat_cut_validation(checkpoints: Path, plan: BatchPlan, validated: Set[int]) -> int | None:
    """Have the trainer validate the newest epoch that it finished, where it was ended before; return the epoch.

    It would go on with the next one, and never compare this one's weights. When its state says that all steps of the
    epoch are made, and not that the epoch is finished, it makes none, saves and validates.
    """
    progress = latest_progress(checkpoints)
    if progress is None or progress.local_step or progress.epoch in validated:
        return None
    state = {**vars(progress), "local_step": plan.steps(progress.epoch)}
    write_json(checkpoints / str(progress.epoch) / TRAINING_STATE, state)
    return progress.epoch


def adopt_interrupted(checkpoints: Path, plan: BatchPlan) -> Progress | None:
    """Make the state that an interrupted run saved the newest checkpoint, and return its progress.

    Returns None, and removes the state, when it was cut off or holds nothing that a checkpoint does not.
    """
    interrupted = checkpoints / INTERRUPTED
    if not interrupted.is_dir():
        return None
    progress = progress_of_interrupted(interrupted, plan)
    latest = latest_progress(checkpoints)
    if progress is None or (latest is not None and latest.global_step >= progress.global_step):
        shutil.rmtree(interrupted)
        return None
    target = checkpoints / str(progress.epoch)
    if target.exists():
        shutil.rmtree(target)
    state = {"epoch": progress.epoch, "local_step": progress.local_step, "global_step": progress.global_step}
    (interrupted / TRAINING_STATE).write_text(json.dumps(state), encoding="utf-8")
    interrupted.replace(target)
    return progress


def progress_of_interrupted(interrupted: Path, plan: BatchPlan) -> Progress | None:
    """Steps made before the interruption, None when nothing was trained or the state is not whole.

    The scheduler's state is written last; its ``last_epoch`` counts optimizer steps.
    """
    path = interrupted / SCHEDULER_STATE
    if not path.is_file():
        return None
    try:
        loaded = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError):
        return None
    scheduler = loaded[0] if isinstance(loaded, list) else loaded
    global_step = int(scheduler["last_epoch"])
    if global_step == 0:
        return None
    epoch, before = 0, 0
    while (steps := plan.steps(epoch)) < global_step - before:
        before += steps
        epoch += 1
    local_step = global_step - before
    return Progress(epoch=epoch, local_step=local_step if local_step < steps else 0, global_step=global_step)


def is_finished(checkpoints: Path, epochs: int) -> bool:
    """Whether the checkpoint of the last of ``epochs`` is there and says that its epoch is finished."""
    last = checkpoints / str(epochs - 1)
    return (last / TRAINING_STATE).is_file() and read_progress(last).local_step == 0


def best_checkpoint(checkpoints: Path, epochs: int) -> Path:
    """The checkpoint with the lowest validation loss; the last epoch's when none was validated.

    Raises:
        Failed: the last epoch's checkpoint is not there.
    """
    last = checkpoints / str(epochs - 1)
    if not is_finished(checkpoints, epochs):
        raise Failed(f"{last}: no checkpoint of epoch {epochs} of {epochs}; run train again, it resumes")
    best = checkpoints / BEST
    return best.resolve() if (best / "model.safetensors").is_file() else last
