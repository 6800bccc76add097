"""The stand-in for the serve environment's interpreter in containers without SGLang."""

import subprocess
import sys
from pathlib import Path

import pytest

from aerie.serving import client
from aerie.serving.host import host_facts, host_facts_of
from aerie.settings.machine import PROJECT_ROOT, python_of

SCRIPT = PROJECT_ROOT / "docker" / "serve-python"


def test_it_says_where_sglang_is() -> None:
    done = subprocess.run([SCRIPT, "-c", "import sglang"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "container sglang" in done.stderr


def test_it_says_what_this_container_sees_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert host_facts_of(SCRIPT).memory_total_bytes == host_facts().memory_total_bytes


def test_a_client_waits_for_the_other_containers_keeper_and_starts_none_of_its_own(tmp_path: Path) -> None:
    # As in the other container: a keeper that Docker is just starting again.
    command = [python_of("serve"), "-m", "aerie.serving.keeper", "--root", tmp_path]
    variables = {"PYTHONPATH": str(PROJECT_ROOT / "include"), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as other:
        try:
            found = client.find_or_start_keeper(tmp_path, SCRIPT, "127.0.0.1", stays=False)
            assert found.status() is None
            found.stop(owner=None)
            assert other.wait(60) == 0
        finally:
            other.kill()
