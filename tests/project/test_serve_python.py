"""The stand-in for the serve environment's interpreter in containers without SGLang."""

import subprocess
from pathlib import Path

import pytest

from aerie.serving import client
from aerie.serving.errors import KeeperUnreachable
from aerie.settings.machine import PROJECT_ROOT

SCRIPT = PROJECT_ROOT / "docker" / "serve-python"


def test_it_says_where_sglang_is() -> None:
    done = subprocess.run([SCRIPT, "-c", "import sglang"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "container sglang" in done.stderr


def test_a_client_waits_for_the_keeper_that_has_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEEPER_START_SECONDS", 1.0)
    with pytest.raises(KeeperUnreachable, match="no keeper after 1 s"):
        client._find_or_start_keeper(tmp_path, SCRIPT, "0.0.0.0")
    assert not (tmp_path / "keeper.lock").exists()
