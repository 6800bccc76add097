"""Plans, and keepers whose server is a fast fake."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.serving import client
from aerie.serving.client import ServerHandle
from aerie.serving.errors import KeeperUnreachable
from aerie.serving.launch import Launched, start_server
from aerie.serving.lease import read_lease
from aerie.serving.plan import ServerPlan
from aerie.serving.probing import ProbeTexts, Probing
from aerie.serving.stopping import family_of, stop_server
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.profile import load_profile

from . import fake_server
from .fake_keeper import fake_command_line
from .helpers import Ensure, Launch

HERE = Path(__file__).parent
TINY_VERIFIER = PROJECT_ROOT / "demo" / "tiny_verifier"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake server is ready at once: who waits for it looks often."""
    monkeypatch.setattr(client, "POLL_SECONDS", 0.1)


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
def probing() -> Probing:
    """A question and a passage for the fake server, whose tokens are of the demo's family."""
    question = (1, 2, 3, fake_server.TOKEN_IDS["<|im_middle|>"], fake_server.TOKEN_IDS["<think>"])
    tokens = VerifierTokens(
        token_ids=fake_server.TOKEN_IDS, vocabulary_size=1000, eos_ids=(900,), tokenizer_sha256="0", model_type="llama"
    )
    return Probing(
        texts=ProbeTexts(question_ids=question, passage_ids=tuple(range(10, 60)), tokens=tokens),
        profile=load_profile("demo"),
        sampling={"temperature": 0.8, "stop_token_ids": [900]},
        logprob_tolerance_nats=0.02,
    )


@pytest.fixture
def fake_plan(make_plan: Callable[..., ServerPlan]) -> Callable[..., ServerPlan]:
    """A plan whose server is a fake of the named behaviour; its checkpoint and its host are real."""
    fields = {"model_path": TINY_VERIFIER, "device": "cpu", "max_total_tokens": 4096}

    def make(behaviour: str = "healthy", **changes: Any) -> ServerPlan:
        return make_plan(extra_arguments=(behaviour,), **{**fields, **changes})

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
        return [] if lease is None else family_of(lease.server, lease.launch_token)

    return find


@pytest.fixture
def ensure(folder: Path, fake_python: Path) -> Ensure:
    """Ensures a server in the test's folder."""

    def call(plan: ServerPlan, **changes: Any) -> ServerHandle:
        options = {"owner": "a test", "lease_seconds": 60.0, "start_timeout_seconds": 30.0}
        return client.ensure_server(plan, folder=folder, python=fake_python, **{**options, **changes})

    return call


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts fake servers and ends them with the test."""
    monkeypatch.setattr(ServerPlan, "command_line", fake_command_line)
    started: list[Launched] = []

    def start(plan: ServerPlan) -> Launched:
        started.append(start_server(plan, python=Path(sys.executable), folder=tmp_path))
        return started[-1]

    yield start
    for launched in started:
        stop_server(launched.identity, launched.token, grace_seconds=0)
        launched.process.wait()
