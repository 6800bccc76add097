"""Ending servers: nothing of theirs is left, and nothing else is touched."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from aerie.ports import free_port, port_is_free
from aerie.processes import ProcessIdentity
from aerie.serving import stopping
from aerie.serving.errors import ProcessesLeft
from aerie.serving.host import Gpu, GpuProcess, HostFacts
from aerie.serving.launch import wait_until_ready
from aerie.serving.stopping import family_of, require_released, stop_server

from .helpers import Launch, Make

GIB = 2**30
SLEEPER = "import time; time.sleep(60)"
LEAVES_A_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{SLEEPER}'])"


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is nobody's server, in a session of its own."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("behaviour", ["healthy", "ignores SIGTERM", "leaves an orphan"])
def test_stop_leaves_no_process_and_a_free_port(
    launch: Launch, fake_plan: Make, tmp_path: Path, behaviour: str
) -> None:
    plan = fake_plan(behaviour)
    launched = launch(plan)
    wait_until_ready(launched, plan, folder=tmp_path, timeout_seconds=20)
    family = family_of(launched.identity, launched.token)

    stop_server(launched.identity, launched.token, grace_seconds=1)

    launched.process.wait()
    assert family_of(launched.identity, launched.token) == []
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert port_is_free(launched.port)


def test_workers_of_a_dead_server_are_found_by_their_session(launch: Launch, fake_plan: Make, tmp_path: Path) -> None:
    plan = fake_plan()
    launched = launch(plan)
    wait_until_ready(launched, plan, folder=tmp_path, timeout_seconds=20)
    launched.process.kill()
    launched.process.wait()
    assert len(family_of(launched.identity, launched.token)) == 1

    stop_server(launched.identity, launched.token, grace_seconds=1)

    assert family_of(launched.identity, launched.token) == []


def test_a_later_process_with_the_pid_of_a_server_lives(innocent: subprocess.Popen[bytes]) -> None:
    created = ProcessIdentity.of(innocent.pid).created
    for earlier in (created - 100, created):  # the second as after a clock was set, or a second boot
        server = ProcessIdentity(pid=innocent.pid, created=earlier)
        assert family_of(server, "launch-1") == []
        assert stop_server(server, "launch-1", grace_seconds=0) == []
        assert innocent.poll() is None


def test_what_is_left_of_a_later_session_with_the_pid_of_a_server_lives() -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEAVES_A_CHILD], start_new_session=True)
    leader.wait()
    server = ProcessIdentity(pid=leader.pid, created=time.time() - 100)
    (child,) = (one for one in psutil.process_iter() if os.getsid(one.pid) == leader.pid)
    try:
        assert stop_server(server, "launch-1", grace_seconds=0) == []
        assert child.is_running()
    finally:
        child.kill()


def test_a_process_that_cannot_be_ended_is_named(
    innocent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "KILL_SECONDS", 0.5)
    monkeypatch.setattr(stopping, "_is_of", lambda process, token: True)
    monkeypatch.setattr(stopping, "send_signal_to", lambda process, number: None)  # as one in the kernel's hands
    server = ProcessIdentity.of(innocent.pid)
    with pytest.raises(ProcessesLeft, match=rf"still there after SIGKILL: pid {innocent.pid} \(python.*, of \w+\)"):
        stop_server(server, "launch-1", grace_seconds=0)


def test_a_port_that_stays_taken_is_an_error_that_names_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "PORT_SECONDS", 0.2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ProcessesLeft, match=f"127.0.0.1:{port} is still taken .* by pid {psutil.Process().pid}"):
            require_released(host="127.0.0.1", port=port, gpu_memory_before=())


def gpus(used: Callable[[], float]) -> Callable[[], HostFacts]:
    """A host with two GPUs, of which the second holds so many GiB; none of this machine's."""

    def facts() -> HostFacts:
        holder = GpuProcess(pid=4711, name="python3", owner="alice", memory_bytes=3 * GIB)
        return HostFacts(
            hostname="gpu-1",
            memory_total_bytes=1,
            memory_available_bytes=1,
            gpus=(
                Gpu(index=0, name="GPU", total_bytes=96 * GIB, used_bytes=GIB, processes=()),
                Gpu(index=1, name="GPU", total_bytes=96 * GIB, used_bytes=int(used() * GIB), processes=(holder,)),
            ),
        )

    return facts


def test_gpu_memory_above_the_level_before_the_launch_names_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "GPU_SECONDS", 0.2)
    monkeypatch.setattr(stopping, "host_facts", gpus(lambda: 4.0))
    with pytest.raises(ProcessesLeft) as left:
        require_released(host="127.0.0.1", port=free_port(), gpu_memory_before=(GIB, GIB))
    assert "GPU 1: 4.00 GiB, 1.00 before, held by pid 4711 (python3, of alice, 3.00 GiB)" in str(left.value)
    assert "GPU 0" not in str(left.value)


def test_gpu_memory_that_the_driver_gives_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = iter([4.0, 4.0, 1.1])
    monkeypatch.setattr(stopping, "host_facts", gpus(lambda: next(levels)))
    require_released(host="127.0.0.1", port=free_port(), gpu_memory_before=(GIB, GIB))
    assert list(levels) == []
