"""What a keeper that was killed, or its host, leaves behind: recognised, and never mistaken for something else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aerie.errors import BadInput
from aerie.processes import ProcessIdentity
from aerie.serving import client
from aerie.serving.errors import (
    KeeperUnreachable,
    LeaseElsewhere,
)
from aerie.serving.lease import Lease, lease_path, read_lease, write
from aerie.serving.reaping import reap
from aerie.serving.stopping import family_of

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
    with pytest.raises(LeaseElsewhere, match="held by host elsewhere"):
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


@pytest.fixture
def stale(ensure: Ensure, fake_plan: Make, folder: Path) -> Lease:
    """The lease of a keeper that was killed, written down again after its server ended too."""
    ensure(fake_plan())
    lease = read_lease(folder)
    assert lease is not None
    client.stop(folder)
    write(lease, lease_path(folder))
    return lease


def test_an_innocent_process_with_the_pid_of_a_stale_lease_lives(
    stale: Lease, ensure: Ensure, fake_plan: Make, folder: Path
) -> None:
    """The host came back after a crash, and the server's pid was given to somebody else, who leads a session too."""
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        identity = ProcessIdentity.of(innocent.pid)
        write(stale.model_copy(update={"server": identity}), lease_path(folder))
        assert not ensure(fake_plan()).reused
        assert client.stop(folder)
        write(stale.model_copy(update={"server": identity}), lease_path(folder))
        assert reap(folder, grace_seconds=1.0) == [
            f"server {stale.url} (pid {innocent.pid}, {stale.launch_token}): its processes are gone"
        ]
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()
    assert read_lease(folder) is None


def test_lease_of_an_earlier_boot_ends_nothing(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    """Even what looks like the server in everything: no process of an earlier boot runs."""
    ensure(fake_plan("ignores SIGTERM"))
    lease = read_lease(folder)
    assert lease is not None
    family = family_of(lease.server, lease.launch_token)
    elsewhere = folder.with_name("copy")
    elsewhere.mkdir()
    write(lease.model_copy(update={"boot_id": "an earlier one"}), lease_path(elsewhere))
    (line,) = reap(elsewhere, grace_seconds=1.0)
    assert line.endswith("this host was started anew since: nothing of it runs")
    assert read_lease(elsewhere) is None
    assert all(map(runs, family))


def test_reap_ends_what_a_killed_keeper_left_and_says_so(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    ensure(fake_plan("ignores SIGTERM"))
    family, keeper = processes_of(), keeper_pid(folder)
    os.kill(keeper, signal.SIGKILL)
    assert until(lambda: client.find_keeper(folder) is None)
    lines = reap(folder, grace_seconds=0.5)
    pids = ", ".join(str(process.pid) for process in sorted(family, key=lambda process: process.pid))
    assert f"its keeper {keeper} is gone; ended processes {pids}" in lines[0]
    assert not any(map(runs, family))
    assert read_lease(folder) is None
    assert reap(folder, grace_seconds=1.0) == []


def test_who_is_merely_told_of_the_servers_folder_is_no_process_of_a_server(folder: Path) -> None:
    """Hosts over the network name the folder to every process: the stage that starts a keeper has it, too."""
    folder.mkdir()
    told = {**os.environ, "AERIE_SERVER_FOLDER": str(folder.resolve())}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=told) as innocent:
        try:
            assert reap(folder, grace_seconds=1.0) == []
            assert innocent.poll() is None
        finally:
            innocent.kill()
