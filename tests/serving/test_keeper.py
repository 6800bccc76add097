"""Keeper, lease and client together, over fake servers: reuse, replacement, and every way to end."""

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from aerie.errors import BadInput
from aerie.ports import free_port
from aerie.serving import client
from aerie.serving.errors import (
    KeeperUnreachable,
    LaunchFailed,
    LeaseLost,
    MachineNotReady,
    NotReady,
    PlanRefused,
    ServerDied,
    WrongServer,
)
from aerie.serving.lease import address_path, lease_path

from .helpers import Ensure, Make, Processes, keeper_pid, runs, until


def test_server_is_started_once_and_then_reused(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    lines: list[str] = []
    first = ensure(fake_plan(), report=lines.append)
    second = ensure(fake_plan(port=free_port()), report=lines.append)
    assert (first.reused, second.reused) == (False, True)
    assert second.launch_token == first.launch_token
    assert requests.get(f"{second.url}/server_info", timeout=5).json()["served_model_name"] == first.launch_token
    assert [line for line in lines if line.startswith("starting")] == lines[:1]
    assert str(first.log_path) in lines[0]
    lease = client.status(folder)
    assert lease is not None
    assert (lease.state, lease.plan_fingerprint) == ("ready", fake_plan().fingerprint())
    assert [holder.owner for holder in lease.holders] == ["a test"]
    assert first.max_total_num_tokens == 4096


def test_start_is_told_stage_by_stage_to_whoever_waits(ensure: Ensure, fake_plan: Make) -> None:
    lines: list[str] = []
    handle = ensure(fake_plan("tells its start"), report=lines.append)
    told = [line.removeprefix(f"server {handle.url}: ") for line in lines]
    stages = [
        "this machine has no GPU: what holds the GPUs was not checked",
        "Load weight begin. avail mem=94.03 GB",
        "Loading safetensors checkpoint shards: 25% (16/64)",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 231120, KV size: 15.13 GB",
        "Capturing batches: 100% (23/23, bs=1 avail_mem=0.82 GB)",
        "The server is fired up and ready to roll!",
    ]
    assert [line for line in told if line in stages] == stages  # each once


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"device": "cuda", "max_total_tokens": None, "hicache_size_gb_per_rank": 100_000},
            PlanRefused,
            "1 ranks x 100000 GB = 100000 GB, but the host has",
        ),
        ({"model_path": Path("/models/nowhere")}, BadInput, "there is no such folder"),
    ],
)
def test_nothing_starts_on_a_doubtful_plan(
    ensure: Ensure, fake_plan: Make, folder: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ensure(fake_plan(**changes))
    assert client.status(folder) is None
    assert not (folder / "logs").exists()


def test_another_plan_replaces_the_server(ensure: Ensure, fake_plan: Make, processes_of: Processes) -> None:
    first = ensure(fake_plan())
    before = processes_of()
    second = ensure(fake_plan(phase="benchmark"))
    assert second.launch_token != first.launch_token
    assert before
    assert not any(map(runs, before))
    with pytest.raises(LeaseLost, match=f"not of {first.launch_token}: that server was replaced"):
        client.renew(first)


def test_stop_ends_server_and_keeper_and_says_whether_there_was_one(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    ensure(fake_plan("ignores SIGTERM"))
    family, keeper = processes_of(), psutil.Process(keeper_pid(folder))
    assert len(family) == 2
    assert client.stop(folder)
    assert not any(map(runs, family))
    assert not lease_path(folder).exists()
    assert until(lambda: not runs(keeper))
    assert not address_path(folder).exists()
    assert not client.stop(folder)
    assert client.status(folder) is None


def test_stop_of_a_replaced_launch_leaves_the_new_one_alone(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    first = ensure(fake_plan())
    ensure(fake_plan(phase="benchmark"))
    with pytest.raises(LeaseLost):
        client.stop(folder, launch_token=first.launch_token)
    assert all(map(runs, processes_of()))


def test_lease_that_nobody_renews_ends_server_and_keeper(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    handle = ensure(fake_plan(), lease_seconds=2.0)
    family, keeper = processes_of(), psutil.Process(keeper_pid(folder))
    assert until(lambda: not any(map(runs, [*family, keeper])))
    assert not lease_path(folder).exists()
    with pytest.raises(LeaseLost, match="gone"):
        client.renew(handle)


def test_lease_that_expires_during_its_replacement_does_not_end_the_new_server(
    ensure: Ensure, fake_plan: Make, processes_of: Processes
) -> None:
    ensure(fake_plan("ignores SIGTERM"), lease_seconds=2.0)  # ending it takes longer than that
    second = ensure(fake_plan(), lease_seconds=30.0)
    time.sleep(2)
    assert all(map(runs, processes_of()))
    client.renew(second)


def test_renewals_keep_the_server_beyond_its_lease(ensure: Ensure, fake_plan: Make, processes_of: Processes) -> None:
    handle = ensure(fake_plan(), lease_seconds=2.0)
    with client.held(handle, lease_seconds=2.0):
        time.sleep(4)
    assert all(map(runs, processes_of()))


def test_waiting_for_a_slow_start_keeps_the_lease(ensure: Ensure, fake_plan: Make) -> None:
    with pytest.raises(NotReady, match="not ready after 5 s"):
        ensure(fake_plan("never ready"), lease_seconds=3.0, start_timeout_seconds=5.0)


def test_terminated_keeper_ends_its_server_first(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    ensure(fake_plan())
    family, keeper = processes_of(), psutil.Process(keeper_pid(folder))
    keeper.terminate()
    assert until(lambda: not any(map(runs, [keeper, *family])))
    assert not lease_path(folder).exists()


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        ("exits at start", LaunchFailed, "CUDA out of memory"),
        ("worker dies at start", LaunchFailed, "the fake worker fell over"),
        ("finds its port taken", MachineNotReady, "another process listens on the port"),
        ("other dtype", WrongServer, "dtype is 'float16'"),
        ("constant answer", WrongServer, "whatever the prompt"),
    ],
)
def test_failed_start_reaches_the_caller_with_its_reason_and_leaves_nothing(
    ensure: Ensure, fake_plan: Make, processes_of: Processes, behaviour: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ensure(fake_plan(behaviour))
    assert processes_of() == []


def test_server_can_be_had_after_a_failed_start(ensure: Ensure, fake_plan: Make) -> None:
    with pytest.raises(LaunchFailed):
        ensure(fake_plan("exits at start"))
    assert not ensure(fake_plan()).reused


def test_death_during_the_work_is_an_error_of_the_work(
    ensure: Ensure, fake_plan: Make, processes_of: Processes
) -> None:
    handle = ensure(fake_plan("worker dies later"))
    with pytest.raises(ServerDied, match="the fake worker fell over"), client.held(handle, lease_seconds=8.0):
        time.sleep(8)
    assert processes_of() == []
    assert not ensure(fake_plan("worker dies later")).reused


def test_stop_while_a_server_starts(ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes) -> None:
    failures: list[Exception] = []

    def try_to_ensure() -> None:
        try:
            ensure(fake_plan("never ready"), start_timeout_seconds=60.0)
        except Exception as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    thread = threading.Thread(target=try_to_ensure)
    thread.start()
    assert until(lambda: len(processes_of()) == 2)
    family = processes_of()
    assert client.stop(folder)
    thread.join()
    assert not any(map(runs, family))
    assert isinstance(failures[0], LeaseLost | KeeperUnreachable)


def test_stop_and_start_in_a_row(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    tokens = set()
    for _ in range(3):
        tokens.add(ensure(fake_plan()).launch_token)
        assert client.stop(folder)
    assert len(tokens) == 3


def test_keeper_that_is_ending_is_followed_by_another(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    ensure(fake_plan("ignores SIGTERM"))
    stopping = threading.Thread(target=client.stop, args=(folder,))
    stopping.start()
    time.sleep(0.5)  # the keeper waits for the old server's grace period
    assert not ensure(fake_plan()).reused
    stopping.join()


def test_keeper_that_cannot_start_is_explained(fake_plan: Make, folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'No module named aiohttp'\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(KeeperUnreachable, match="No module named aiohttp"):
        client.ensure_server(fake_plan(), folder=folder, owner="a test", python=broken)
