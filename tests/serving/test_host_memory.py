"""A CPU host's memory: read as SGLang reads it, and what others take told from what the server takes."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from aerie.processes import ProcessIdentity
from aerie.serving import host_memory
from aerie.serving.host_memory import OtherProcesses, Taken, available_bytes, settled_available_bytes

MIB = 1 << 20


def test_a_containers_limit_and_numa_nodes_make_less_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup, nodes = tmp_path / "cgroup", tmp_path / "nodes"
    cgroup.mkdir()
    for number, processors in enumerate(("0-3", "4-7", "")):  # the last has memory alone
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(f"{processors}\n")
    monkeypatch.setattr("aerie.serving.host.CGROUP", cgroup)
    monkeypatch.setattr(host_memory, "NUMA_NODES", nodes)
    (cgroup / "memory.current").write_text(f"{100 * MIB}\n")
    (cgroup / "memory.max").write_text(f"{300 * MIB}\n")
    assert available_bytes() == 100 * MIB
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes() == pytest.approx(psutil.virtual_memory().available / 2, rel=0.5)


def test_memory_that_still_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter((1000, 2000, 3000, 3001, 9000))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: next(readings) * MIB)
    monkeypatch.setattr(host_memory, "SETTLE_POLL_SECONDS", 0)
    assert settled_available_bytes() == 3001 * MIB


class Host:
    """A host whose memory moves as a test says, and the log of a server that starts there."""

    def __init__(self, log: Path) -> None:
        self.available, self.own, self.log = 20_000 * MIB, 0, log
        log.write_text("")

    def move(self, *, server: int = 0, others: int = 0, says: str = "") -> None:
        """The server and the others take so many MiB, and the server logs a line."""
        self.own, self.available = self.own + server * MIB, self.available - (server + others) * MIB
        with self.log.open("a") as log:
            log.write(says + "\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    simulated = Host(tmp_path / "server.log")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: simulated.available)
    monkeypatch.setattr(host_memory, "memory_of", lambda _: simulated.own)
    return simulated


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the watch did not notice"
        time.sleep(0.01)


def test_what_others_take_is_told_from_what_the_server_takes_until_its_pool_is_sized(host: Host) -> None:
    server = ProcessIdentity.of(psutil.Process().pid)
    with OtherProcesses(server, host.log, host.available) as others:
        host.move(server=1300, others=500)
        host.move(says="[2026-11-30 00:00:01] Memory baseline taken. mem usage=0.00 GB")
        eventually(lambda: others.taken == Taken(500 * MIB, 0))
        host.move(server=10, others=-200)
        eventually(lambda: others.taken == Taken(500 * MIB, -200 * MIB))
        host.move(says="[2026-11-30 00:00:05] Load weight end. elapsed=0.04 s, avail mem=17.90 GB")
        host.move(others=50)
        eventually(lambda: others.taken == Taken(500 * MIB, -150 * MIB))
        host.move(server=2000)
        host.move(others=4000)
    assert others.taken == Taken(500 * MIB, -150 * MIB)
    assert others.taken.as_before_launch(0.1) == (500 - 1500) * MIB


def test_a_server_that_never_says_where_it_is_counts_as_undisturbed(host: Host) -> None:
    with OtherProcesses(ProcessIdentity.of(psutil.Process().pid), host.log, host.available) as others:
        host.move(server=100, others=700)
    assert others.taken == Taken(0, 0)
