"""What a keeper that was killed, or its host, leaves behind: recognised, and never mistaken for something else."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from aerie.errors import BadInput
from aerie.serving import client
from aerie.serving.errors import (
    KeeperUnreachable,
    LeaseElsewhere,
)
from aerie.serving.lease import lease_path, read_lease, write

from .helpers import Ensure, Make, Processes, keeper_pid, runs, until


def test_killed_keeper_takes_its_server_along_and_the_next_ensure_starts_anew(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    first = ensure(fake_plan())
    family = processes_of()
    os.kill(keeper_pid(folder), signal.SIGKILL)
    assert until(lambda: not any(map(runs, family)))
    second = ensure(fake_plan())
    assert not second.reused
    assert second.launch_token != first.launch_token


def test_what_survives_a_killed_keeper_is_ended_before_the_next_start(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    ensure(fake_plan("ignores SIGTERM"))
    family = processes_of()
    os.kill(keeper_pid(folder), signal.SIGKILL)
    time.sleep(1)
    assert all(map(runs, family))  # it ignores what the kernel sends it when its parent dies
    ensure(fake_plan())
    assert not any(map(runs, family))


def test_stop_ends_what_survives_a_killed_keeper(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GRACE_SECONDS", 1.0)
    ensure(fake_plan("ignores SIGTERM"))
    family = processes_of()
    os.kill(keeper_pid(folder), signal.SIGKILL)
    assert until(lambda: client.find_keeper(folder) is None)
    assert client.stop(folder)
    assert not any(map(runs, family))


def test_lease_of_another_host_is_left_alone_until_it_expires(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    handle = ensure(fake_plan())
    lease = read_lease(folder)
    assert lease is not None
    client.stop(folder, launch_token=handle.launch_token)
    abroad = lease.model_copy(update={"host": "elsewhere", "expires_at": time.time() + 100})
    write(abroad, lease_path(folder))
    with pytest.raises(KeeperUnreachable, match="held by host elsewhere"):
        ensure(fake_plan())
    with pytest.raises(LeaseElsewhere, match="on host elsewhere"):
        client.stop(folder)
    write(abroad.model_copy(update={"expires_at": time.time() - 1}), lease_path(folder))
    assert not ensure(fake_plan()).reused


def test_damaged_lease_names_its_file(folder: Path) -> None:
    folder.mkdir()
    lease_path(folder).write_text(json.dumps({"server": "?"}))
    with pytest.raises(BadInput, match=r"lease\.json: not a Lease"):
        read_lease(folder)
    lease_path(folder).unlink()


def test_lease_of_an_older_aerie_is_recognised(folder: Path) -> None:
    folder.mkdir()
    older = {"schema_version": 1, "host": "gpu-7", "server": {"pid": 4711, "created": 1.0}, "owner": "a run"}
    lease_path(folder).write_text(json.dumps(older))
    with pytest.raises(BadInput, match=r"schema version 1, .* its server was process 4711 of host gpu-7") as refused:
        read_lease(folder)
    assert "Stop it with the Aerie that started it" in str(refused.value)
    lease_path(folder).unlink()
