"""The supervisor of Airflow's components; they are scripts here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from aerie.local.supervisor import COMPONENTS, SupervisorState
from aerie.settings.machine import PROJECT_ROOT

COMPONENT = """#!/bin/sh
sleep 600 &
worker=$!
env > {workers}/$1.variables
echo $worker >> {workers}/$1
trap "kill $worker; exit" TERM
wait
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folders = [tmp_path / name for name in ("home", "bin", "workers")]
    for folder in (*folders, folders[0] / "logs", folders[0] / "run"):
        folder.mkdir()
    script = tmp_path / "bin" / "airflow"
    script.write_text(COMPONENT.format(workers=tmp_path / "workers"))
    script.chmod(0o755)
    return folders[0]


@pytest.fixture
def supervisor(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    variables = {
        "AERIE_HOME": str(home),
        "PATH": f"{home.parent / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT_ROOT / "include"),
        "AERIE_DATABASE_URL": "of the pipeline",
        "AERIE_DATABASE_DASHBOARD_URL": "of the dashboard",
    }
    with subprocess.Popen([sys.executable, "-m", "aerie.local.supervisor"], env=variables) as process:
        yield process
        process.terminate()


def until(condition: Callable[[], bool]) -> None:
    while not condition():  # bounded by the test's own limit
        time.sleep(0.1)


def workers_of(home: Path, name: str) -> list[int]:
    path = home.parent / "workers" / name
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.timeout(120)
def test_workers_of_a_component_that_was_killed_end_with_the_supervisor(
    home: Path, supervisor: subprocess.Popen[bytes]
) -> None:
    until(lambda: all(workers_of(home, name) for name in COMPONENTS))
    state = SupervisorState.model_validate_json((home / "run" / "supervisor.json").read_bytes())
    os.kill(state.components["scheduler"].pid, signal.SIGKILL)
    until(lambda: len(workers_of(home, "scheduler")) == 2)
    workers = [pid for name in COMPONENTS for pid in workers_of(home, name)]
    assert all(psutil.pid_exists(pid) for pid in workers)
    supervisor.terminate()
    supervisor.wait()
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers))
    assert not (home / "run" / "supervisor.json").exists()


@pytest.mark.timeout(120)
def test_the_web_server_has_the_database_user_that_only_reads_and_no_other(
    home: Path, supervisor: subprocess.Popen[bytes]
) -> None:
    until(lambda: all(workers_of(home, name) for name in COMPONENTS))
    databases = {}
    for name in COMPONENTS:
        lines = (home.parent / "workers" / f"{name}.variables").read_text().splitlines()
        databases[name] = [line.partition("=")[2] for line in lines if line.startswith("AERIE_DATABASE_")]
    expected = {name: ["of the pipeline"] for name in COMPONENTS}
    assert databases == {**expected, "api-server": ["of the dashboard"]}
