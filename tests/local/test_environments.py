import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.local import environments
from aerie.settings.machine import PROJECT_ROOT


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    yield importlib.reload(environments)
    monkeypatch.undo()
    importlib.reload(environments)


def test_an_environment_whose_lock_changed_is_made_anew(home, tmp_path, monkeypatch):
    monkeypatch.setattr(home, "REQUIREMENTS", tmp_path)
    (tmp_path / "airflow.txt").write_text("a==1\n")
    folder = tmp_path / "envs" / "airflow"
    folder.mkdir(parents=True)
    (folder / home.MARK).write_text(home.wanted_mark("airflow"))
    assert home.is_complete("airflow")
    (tmp_path / "airflow.txt").write_text("a==2\n")
    assert not home.is_complete("airflow")


def test_an_environment_cut_off_while_installing_is_not_taken_for_complete(home, tmp_path):
    (tmp_path / "envs" / "airflow" / "bin").mkdir(parents=True)
    assert not home.is_complete("airflow")


def run_bootstrap(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {"PATH": os.environ["PATH"], "AERIE_HOME": str(tmp_path / "home")}
    return subprocess.run(
        [str(PROJECT_ROOT / "aerie"), "status"], env={**kept, **variables}, capture_output=True, text=True, timeout=120
    )


def test_without_a_fitting_python_the_bootstrap_says_what_to_install_in_one_line(tmp_path):
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "env"):
        (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    done = run_bootstrap(tmp_path, PATH=str(tmp_path / "bin"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Python 3.11" in done.stderr and "AERIE_PYTHON" in done.stderr


def test_a_wrong_aerie_python_is_named(tmp_path):
    done = run_bootstrap(tmp_path, AERIE_PYTHON="/bin/false")
    assert done.returncode == 2
    assert "AERIE_PYTHON=/bin/false" in done.stderr


def test_without_network_setup_says_so_in_one_line(tmp_path):
    done = run_bootstrap(
        tmp_path,
        AERIE_PYTHON=sys.executable,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="0",
        PIP_CONFIG_FILE=os.devnull,
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 2
    assert "check the network" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "home" / "envs" / "tools" / environments.MARK).exists()
