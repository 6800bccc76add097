"""What the tests of the project's own files share."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.settings.machine import PROJECT_ROOT


def tracked_files() -> list[Path]:
    """Every file that Git tracks and that is still there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT_ROOT, capture_output=True, check=True, text=True)
    return [path for name in listed.stdout.split("\0") if name and (path := PROJECT_ROOT / name).is_file()]


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    """The Compose file, its anchors resolved."""
    document: dict[str, Any] = yaml.safe_load((PROJECT_ROOT / "docker-compose.yaml").read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="session")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    """The Compose file's services by name."""
    found: dict[str, Any] = compose["services"]
    return found
