"""A training on streamed states through a real server and the real trainer, beside one with every state on the disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from aerie.artefacts.manifest import read_manifest
from aerie.errors import Failed, Retryable
from aerie.hidden_states.stage import capture, forecast
from aerie.serving.client import status, stop
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import PipelineSettings
from aerie.training.stage import train

from .conftest import response
from .test_streaming import Disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROWS, TRAIN_ROWS, EPOCHS = 60, 52, 2
GIB = 1 << 30
LAST_DIGIT = 0.0011
"""The trainer prints three digits after the point: losses that hardly differ may be printed one digit apart."""


@pytest.fixture
def served(edition, monkeypatch):
    """An edition whose capturing server is real, and ended after the test."""
    # Random weights say none of the rows, and without a tokenizer they answer no question.
    monkeypatch.setattr("aerie.hidden_states.last_slot.MINIMUM_AGREEMENT", 0.0)
    monkeypatch.setattr("aerie.serving.configured.probing_of", lambda *_: None)
    random = np.random.default_rng(1)
    ids = [response(random.integers(2, 40, int(random.integers(12, 50))).tolist()) for _ in range(ROWS)]
    edition.merge(ids, TRAIN_ROWS)
    edition.vocabulary(ids)
    yield edition
    stop(edition.request().server_folder)


def request_of(edition, *, force=False, disk_limit_bytes=None, arguments=()):
    request = edition.request(force=force, training={"epochs": EPOCHS, "extra_arguments": list(arguments)})
    settings = request.settings.model_dump()
    settings["serving"] |= {
        "mem_fraction_static": 0.2, "max_total_tokens": 8192, "start_timeout_seconds": 900,
        "extra_arguments": ["--skip-tokenizer-init"],
    }  # fmt: skip
    settings["hidden_states"] |= {
        "dtype": "float32", "free_share": 0.0,
        "disk_limit_gib": None if disk_limit_bytes is None else disk_limit_bytes / GIB,
    }  # fmt: skip
    return request.model_copy(update={"settings": PipelineSettings.model_validate(settings)})


def losses(edition):
    """Loss by step, in the order in which the steps were made."""
    lines = (edition.files.training / "steps.jsonl").read_text().splitlines()
    return [(line["global_step"], line["loss"]) for line in map(json.loads, lines)]


def start_training(edition, request):
    document = edition.root / "request.json"
    document.write_text(request.model_dump_json())
    paths = {"--request": document, "--result": edition.root / "result.json", "--events": edition.root / "stage.jsonl"}
    # As the fixture does for this process.
    program = (
        "import sys, aerie.serving.configured as c, aerie.hidden_states.last_slot as l; from aerie.cli import main; "
        "c.probing_of = lambda *_: None; l.MINIMUM_AGREEMENT = 0.0; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "stage", "train", *(str(part) for pair in paths.items() for part in pair)],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include")},
    )


def wait_for_steps(edition, count, *, process=None, seconds=900):
    deadline = time.monotonic() + seconds
    path = edition.files.training / "steps.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process is None or process.poll() is None, f"the stage ended with {process.returncode}"
        assert time.monotonic() < deadline, "the training did not get that far"
        time.sleep(0.02)


def test_streamed_in_a_tenth_of_the_disk_a_training_that_is_killed_twice_has_the_losses_of_one_with_all_on_the_disk(
    served,
):
    forecast(request_of(served), served.events)
    kept = capture(request_of(served), served.events).manifest.counts
    trained = train(request_of(served), served.events).manifest.counts
    expected = losses(served)
    assert [step for step, _ in expected] == list(range(trained["steps"]))

    limit = kept["bytes"] // 10
    streamed = request_of(served, disk_limit_bytes=limit, arguments=["--num-workers", "2"])
    assert forecast(streamed, served.events).manifest.counts["window_bytes"] == pytest.approx(limit, abs=1)
    with pytest.raises(Failed, match="mode None -> streamed"):  # a capture that was paid for is not thrown away
        capture(streamed, served.events)
    proved = capture(
        request_of(served, force=True, disk_limit_bytes=limit, arguments=["--num-workers", "2"]), served.events
    ).manifest.counts
    assert 0 < proved["files"] < ROWS
    assert proved["parity"]["maximum_relative"] < 1e-5
    assert capture(streamed, served.events).reused

    with Disk(served.files.hidden_states) as disk:
        shutil.rmtree(served.files.training)
        stage = start_training(served, streamed)  # 1: the stage is killed, and takes what it captures with it
        wait_for_steps(served, 9, process=stage)
        stage.send_signal(signal.SIGKILL)
        stage.wait()
        before_kill = len(losses(served))

        server_killed = threading.Event()  # 2: the server dies

        def kill_server():
            wait_for_steps(served, before_kill + 9)
            os.kill(status(streamed.server_folder).server.pid, signal.SIGKILL)
            server_killed.set()

        threading.Thread(target=kill_server, daemon=True).start()
        with pytest.raises(Retryable):
            train(streamed, served.events)
        assert server_killed.wait(60)
        assert disk.bytes() == 0

        result = train(streamed, served.events).manifest.counts  # 3: to the end
    assert result["resumed_from_step"] >= before_kill + 9
    assert result["steps"] == trained["steps"]
    assert disk.bytes() == 0
    assert 0 < disk.most <= limit
    # A killed stage has not read the trainer's last lines.
    found = dict(losses(served))
    assert len(found) >= trained["steps"] - 20
    for step, loss in expected:
        if step in found:
            assert found[step] == pytest.approx(loss, rel=1e-4, abs=LAST_DIGIT), f"step {step}"
    # Captured in batches of other sizes, states differ in rounding, and so does what was learned of them.
    assert result["validation"]["loss"] == pytest.approx(trained["validation"]["loss"], rel=1e-3)
    assert read_manifest(served.files.manifest("train")).counts["streamed"]["peak_bytes"] <= limit
