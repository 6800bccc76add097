"""Plans, and keepers whose server is a fast fake."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aerie.serving import client
from aerie.serving.errors import KeeperUnreachable
from aerie.serving.launch import family_of
from aerie.serving.lease import read_lease
from aerie.serving.plan import ServerPlan

HERE = Path(__file__).parent


@pytest.fixture
def make_plan() -> Callable[..., ServerPlan]:
    """A plan that is right, but for what is changed."""

    def make(**changes: Any) -> ServerPlan:
        fields = {
            "model_path": Path("/models/verifier"),
            "model_identity": "verifier-1",
            "phase": "generate",
            "mem_fraction_static": 0.88,
            "context_length": 4096,
        }
        return ServerPlan(**{**fields, **changes})

    return make


@pytest.fixture
def fake_plan(make_plan: Callable[..., ServerPlan]) -> Callable[..., ServerPlan]:
    """A plan whose server is a fake of the named behaviour."""

    def make(behaviour: str = "healthy", **changes: Any) -> ServerPlan:
        return make_plan(extra_arguments=(behaviour,), **changes)

    return make


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter that runs the fake keeper where the real one is asked for."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{HERE / "fake_keeper.py"}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A server's folder; whatever still runs for it at the end of the test is ended."""
    place = tmp_path / "server"
    yield place
    try:
        client.stop(place)
    except KeeperUnreachable:
        pytest.fail(f"the keeper of {place} hangs")


@pytest.fixture
def processes_of(folder: Path) -> Callable[[], list[psutil.Process]]:
    """Processes of the server that the folder's lease names."""

    def find() -> list[psutil.Process]:
        lease = read_lease(folder)
        return [] if lease is None else family_of(lease.server)

    return find
