"""Starting server processes, with fakes that fail as real ones do."""

import os
import time

import pytest

from aerie.serving.errors import LaunchFailed, NotReady, ServerDied, WrongServer
from aerie.serving.launch import (
    Launched,
    wait_until_ready,
)
from aerie.serving.plan import ServerPlan
from aerie.serving.stopping import family_of

from .helpers import Launch, Make


def wait(launched: Launched, plan: ServerPlan, seconds: float = 20) -> str:
    return wait_until_ready(launched, plan, folder=launched.log.path.parent, timeout_seconds=seconds).url


def test_server_runs_in_a_session_of_its_own_and_logs_its_command(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan()
    launched = launch(plan)
    assert wait(launched, plan) == launched.url
    assert os.getsid(launched.process.pid) == launched.process.pid
    assert f"--served-model-name {launched.token}" in launched.log.path.read_text().splitlines()[0]
    assert len(family_of(launched.identity, launched.token)) == 2


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


def test_server_that_never_answers_is_given_up_and_told_how_far_it_got(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan("never ready")
    with pytest.raises(NotReady, match=r"not ready after 2 s: .*503.*it got as far as: Load weight begin"):
        wait(launch(plan), plan, seconds=2)


def test_server_that_came_up_otherwise_is_refused_at_once(launch: Launch, fake_plan: Make) -> None:
    plan = fake_plan("other dtype")
    with pytest.raises(WrongServer, match="dtype is 'float16', expected 'bfloat16'"):
        wait(launch(plan), plan)
