"""The crash matrix against a server that answers at once: database, disk, network and clock.

What a real SGLang adds (its own death, and real load) is in ``test_real_server``; 50 kills are in
``benchmarks/crash_matrix.py``.
"""

import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aerie.errors import Retryable
from aerie.generation import client, stage
from aerie.stages import run_stage

from .conftest import DATASET, ensure, make_prompts, manifest_of, write_dataset
from .fake_server import VOCABULARY_SIZE, answer_ids
from .invariants import check_durable_before_counted, check_invariants
from .proxy import Proxy, random_fault
from .test_stage import start_generator


def check(world) -> None:
    check_invariants(world.files, world.database_url, edition="main", dataset=DATASET)


def once_at(requests: int, action):
    """A fault that does something once, when so many requests have come, before any of them is answered further."""
    done = []

    def fault(body, before):
        done.append(body)
        if len(done) == requests:
            action()

    return fault


# PostgreSQL


def test_postgresql_stopped_under_load_and_restarted_some_seconds_later_costs_no_request(world, postgres):
    restart = threading.Timer(3.0, postgres.start)

    def stop():
        postgres.stop()
        restart.start()

    world.server.delay_seconds = 0.1
    world.server.fault = once_at(15, stop)
    try:
        counts = manifest_of(world.run()).counts
    finally:
        restart.join()
        postgres.start()  # for the tests that follow
    assert counts["kept"] == 40
    assert max(world.server.seen.values()) == 1
    check(world)


# The disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: a disk that is really full. It takes root to mount one: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # the events of the last run are still open


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 512)
        except OSError:
            return


def test_a_full_disk_ends_the_task_worth_retrying_and_the_next_try_goes_on(world, small_disk):
    world.root = small_disk
    (small_disk / "verifier").mkdir()
    (small_disk / "verifier" / "model.safetensors").write_bytes(b"weights")
    world.server.info = {"model_path": str(small_disk / "verifier")}
    write_dataset(world.files, make_prompts(40))
    request = small_disk / "request.json"
    request.write_text(world.request().model_dump_json())
    paths = {"request": request, "result": small_disk / "result.json", "events": small_disk / "events.jsonl"}
    world.server.delay_seconds = 0.1
    world.server.fault = once_at(15, lambda: fill(small_disk))
    with pytest.raises(Retryable, match="No space left on device"):
        run_stage("generate", **paths)
    durable = check_durable_before_counted(world.files.responses, world.database_url, edition="main", dataset=DATASET)
    before = world.server.seen.copy()
    (small_disk / "filler").unlink()
    assert manifest_of(run_stage("generate", **paths)).counts["kept"] == 40
    assert durable and all(world.server.seen[sample_id] == before[sample_id] for sample_id in durable)
    check(world)


def test_a_log_that_may_not_grow_leaves_only_whole_rows_and_the_next_try_goes_on(world):
    """The same without root: the largest file that the process may write is smaller than its log."""
    size = 9000
    process = start_generator(world, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    _, error = process.communicate(timeout=60)
    assert process.returncode and b"Retryable" in error and b"File too large" in error, error.decode()
    assert world.files.responses.read_bytes().endswith(b"\n")
    durable = check_durable_before_counted(world.files.responses, world.database_url, edition="main", dataset=DATASET)
    before = world.server.seen.copy()
    assert manifest_of(world.run()).counts["kept"] == 40
    assert durable and all(world.server.seen[sample_id] == before[sample_id] for sample_id in durable)
    check(world)


# The network


@pytest.mark.parametrize("seed", [1, 2])
def test_a_network_that_cuts_delays_resets_and_corrupts_costs_attempts_not_samples(world, monkeypatch, seed):
    """One byte of a reply may turn one ordinary token id into another: nothing in the reply can show that, and a
    checksum of TCP, or TLS, has to. Everything else is told apart and sent again, failed by name, or quarantined. A
    length that was changed to a larger one leaves both sides waiting: the request's timeout ends that.
    """
    monkeypatch.setattr(stage, "FIRST_BACKOFF_SECONDS", 0.01)
    write_dataset(world.files, make_prompts(300))

    def fault(number):  # the first connection is spared: the server says who it is
        return random_fault(number, seed=seed, longest=10_000) if number else None

    with Proxy(world.server.port, fault) as proxy:
        monkeypatch.setattr(stage, "_ensure_server", ensure(proxy.url))
        counts = manifest_of(world.run(generation={"maximum_attempts": 6, "request_timeout_seconds": 2})).counts
        assert len(proxy.done) == 4 and proxy.done.total() >= 20, proxy.done
    assert counts["stopped_by"] == "prompts_exhausted" and counts["kept"] >= 270
    ledger = world.ledger()
    kinds = {reason for row in ledger.values() if row.state == "failed" for reason in row.reasons}
    assert kinds <= {
        "request_poisoned",
        "request_schema",
        "request_inconsistent",
        "request_connection",
        "request_timeout",
    }, kinds
    for row in world.log():
        expected = answer_ids(row["sample_id"])
        changed = [token for token, right in zip(row["output_ids"], expected, strict=False) if token != right]
        if ledger[row["sample_id"]].state == "kept" and changed:
            assert len(changed) == 1 and 0 <= changed[0] < VOCABULARY_SIZE and len(row["output_ids"]) == len(expected)
    check(world)


def test_a_network_that_is_away_for_seconds_ends_the_task_worth_retrying_and_the_next_try_goes_on(world, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(client, "GONE_AFTER_SECONDS", 1.0)
    world.server.delay_seconds = 0.1
    with Proxy(world.server.port) as proxy:
        monkeypatch.setattr(stage, "_ensure_server", ensure(proxy.url))

        def lose():
            proxy.swallow = True

        world.server.fault = once_at(15, lose)
        with pytest.raises(Retryable, match="answers nothing"):
            world.run()
        check_durable_before_counted(world.files.responses, world.database_url, edition="main", dataset=DATASET)
        proxy.swallow = False
        assert manifest_of(world.run()).counts["kept"] == 40
    check(world)


# The clock


@pytest.mark.parametrize("step_seconds", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_is_set_changes_nothing(world, monkeypatch, step_seconds):
    right, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: right() + offset[0])

    def step():
        offset[0] = step_seconds

    world.server.delay_seconds = 0.1
    world.server.fault = once_at(15, step)
    assert manifest_of(world.run()).counts["kept"] == 40
    assert max(world.server.seen.values()) == 1
    elapsed = [event["elapsed_seconds"] for event in world.events("progress") if "elapsed_seconds" in event]
    assert elapsed == sorted(elapsed) and all(0 <= seconds < 60 for seconds in elapsed)
    check(world)
