"""A trainer that hangs. A stand-in prints what speculators prints."""

import os
import re
import sys
import time

import psutil
import pytest

from aerie.errors import Failed
from aerie.training import trainer_process
from aerie.training.trainer_process import run_trainer

STEP = "train/loss=1.5, train/error_records=0, epoch=0, lr=1e-3, global_step={}"
HANGS = f"""
import subprocess, time
worker = subprocess.Popen(["sh", "-c", "trap '' ABRT; exec sleep 600"])
print("worker", worker.pid, flush=True)
def waits_for_a_collective():
    time.sleep(600)
print({STEP.format(0)!r}, flush=True)
waits_for_a_collective()
"""
WORKS = f"""
for step in range(2):
    print({STEP!r}.format(step), flush=True)
"""


def trained(script, tmp_path, stall_seconds, fed_since=None):
    steps = []
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        report = run_trainer(
            [sys.executable, "-c", script],
            log=tmp_path / "train.log",
            lock=lock,
            on_step=lambda step: steps.append(time.monotonic()),
            on_validation=lambda metrics: None,
            stall_seconds=stall_seconds,
            fed_since=fed_since,
        )
    finally:
        os.close(lock)
    return report, steps


@pytest.mark.timeout(120)
def test_a_trainer_that_makes_no_step_is_ended_with_its_workers_and_says_where_it_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_process, "ABORT_SECONDS", 1.0)
    with pytest.raises(Failed, match=r"made no step for .*training\.stall_minutes") as raised:
        trained(HANGS, tmp_path, stall_seconds=1.0)
    assert "in waits_for_a_collective" in str(raised.value)
    worker = re.search(r"worker (\d+)", (tmp_path / "train.log").read_text())
    assert worker is not None
    assert not psutil.pid_exists(int(worker[1])) or psutil.Process(int(worker[1])).status() == psutil.STATUS_ZOMBIE


def test_every_step_counts_as_progress(tmp_path):
    report, steps = trained(WORKS, tmp_path, stall_seconds=600)
    assert report.exit_code == 0
    assert steps[0] < report.progressed_at <= steps[1]


@pytest.mark.timeout(120)
def test_a_trainer_that_waits_for_states_that_are_not_made_yet_does_not_count_as_hung(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_process, "ABORT_SECONDS", 1.0)
    asked = []

    def fed_since():
        asked.append(time.monotonic())
        return None if len(asked) < 20 else asked[19]

    with pytest.raises(Failed, match="made no step"):
        trained(HANGS, tmp_path, stall_seconds=1.0, fed_since=fed_since)
    assert len(asked) > 20, "it was ended while it waited"
    assert asked[-1] - asked[19] > 0.5, "the time before counted"
