"""Starting and ending server processes, with fakes that fail as real ones do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from aerie.processes import ProcessIdentity
from aerie.serving.errors import LaunchFailed, NotReady, ServerDied, WrongServer
from aerie.serving.launch import (
    Launched,
    family_of,
    free_port,
    port_is_free,
    start_server,
    stop_server,
    wait_until_ready,
)
from aerie.serving.plan import ServerPlan

from .fake_keeper import fake_command_line

Make = Callable[..., ServerPlan]
Launch = Callable[[ServerPlan], Launched]
PYTHON = Path(sys.executable)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts fake servers and ends them with the test."""
    monkeypatch.setattr(ServerPlan, "command_line", fake_command_line)
    started: list[Launched] = []

    def start(plan: ServerPlan) -> Launched:
        started.append(start_server(plan, python=PYTHON, folder=tmp_path))
        return started[-1]

    yield start
    for launched in started:
        stop_server(launched.identity, grace_seconds=0)
        launched.process.wait()


def wait(launched: Launched, plan: ServerPlan, seconds: float = 20) -> str:
    return wait_until_ready(launched, plan, folder=launched.log.path.parent, timeout_seconds=seconds).url


def test_server_runs_in_a_session_of_its_own_and_logs_its_command(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan()
    launched = launch(plan)
    assert wait(launched, plan) == launched.url
    assert os.getsid(launched.process.pid) == launched.process.pid
    assert f"--served-model-name {launched.token}" in launched.log.path.read_text().splitlines()[0]
    assert len(family_of(launched.identity)) == 2


@pytest.mark.parametrize("behaviour", ["healthy", "ignores SIGTERM", "leaves an orphan"])
def test_stop_leaves_no_process_and_a_free_port(launch: Launch, fake_plan: Make, behaviour: str) -> None:
    plan = fake_plan(behaviour)
    launched = launch(plan)
    wait(launched, plan)
    family = family_of(launched.identity)

    stop_server(launched.identity, grace_seconds=1)

    launched.process.wait()
    assert family_of(launched.identity) == []
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert port_is_free("127.0.0.1", launched.port)


def test_workers_of_a_dead_server_are_found_by_their_session(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan()
    launched = launch(plan)
    wait(launched, plan)
    launched.process.kill()
    launched.process.wait()
    assert len(family_of(launched.identity)) == 1

    stop_server(launched.identity, grace_seconds=1)

    assert family_of(launched.identity) == []


def test_a_later_process_with_the_same_pid_is_not_ours() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        earlier = ProcessIdentity(pid=process.pid, created=ProcessIdentity.of(process.pid).created - 100)
        assert family_of(earlier) == []
        stop_server(earlier, grace_seconds=0)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_server_that_exits_is_explained_from_its_log(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan("exits at start")
    with pytest.raises(
        LaunchFailed, match=r"ended with status 1: RuntimeError: CUDA out of memory.*lower serving\.mem"
    ):
        wait(launch(plan), plan)


def test_dead_worker_behind_a_living_http_process_is_noticed(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan("worker dies at start")
    launched = launch(plan)
    deadline = time.monotonic() + 20
    while not launched.log.over and time.monotonic() < deadline:
        launched.log.read()
    with pytest.raises(LaunchFailed, match="lost a worker process: RuntimeError: the fake worker fell over"):
        wait(launched, plan)
    with pytest.raises(ServerDied, match="the fake worker fell over"):
        launched.require_alive()


def test_server_that_never_answers_is_given_up(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan("never ready")
    with pytest.raises(NotReady, match=r"not ready after 2 s: .*503"):
        wait(launch(plan), plan, seconds=2)


def test_server_that_came_up_otherwise_is_refused_at_once(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan("other dtype")
    with pytest.raises(WrongServer, match="dtype is 'float16', expected 'bfloat16'"):
        wait(launch(plan), plan)


def test_free_port_is_free() -> None:
    assert port_is_free("127.0.0.1", free_port("127.0.0.1"))
