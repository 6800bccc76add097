"""``./aerie server`` over a fake server."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aerie.cli import app
from aerie.errors import Failed
from aerie.serving import client
from aerie.serving.client import ServerHandle
from aerie.serving.lease import read_lease
from aerie.serving.plan import ServerPlan
from aerie.settings.machine import PROJECT_ROOT, python_of, server_folder

FAKE_KEEPER = PROJECT_ROOT / "tests" / "serving" / "fake_keeper.py"
Ensure = Callable[..., ServerHandle]


@pytest.fixture
def ensure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ensure]:
    """Has a fake server in a home of its own, and ends what is left of it."""
    serve = python_of("serve")
    monkeypatch.setenv("AERIE_SERVE_PYTHON", str(serve))
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec "{serve}" "{FAKE_KEEPER}" "$@"\n')
    script.chmod(0o755)

    def call(owner: str, behaviour: str = "healthy") -> ServerHandle:
        plan = ServerPlan(
            model_path=PROJECT_ROOT / "demo" / "tiny_verifier", model_identity="verifier-1", phase="generate",
            device="cpu", mem_fraction_static=0.88, max_total_tokens=4096, context_length=4096,
            extra_arguments=(behaviour,),
        )  # fmt: skip
        return client.ensure_server(plan, folder=server_folder(), owner=owner, python=script, lease_seconds=60.0)

    yield call
    client.stop(server_folder())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["server", *arguments])


def test_list_names_holders_plan_and_log(ensure: Ensure) -> None:
    assert "no server of ours runs" in run("list").output
    assert json.loads(run("list", "--json").stdout) is None
    handle = ensure("run 1")
    ensure("run 2")
    shown = run("list").output
    for part in (handle.url, str(handle.log_path), "run 1 (until 20", "run 2 (until 20", "ready", "4,096"):
        assert part in shown
    document = json.loads(run("list", "--json").stdout)
    assert [holder["owner"] for holder in document["holders"]] == ["run 1", "run 2"]
    assert document["launch_token"] == handle.launch_token


def test_stop_ends_only_what_is_ones_own_unless_forced(ensure: Ensure) -> None:
    ensure("run 1")
    ensure("run 2")
    refused = run("stop", "--owner", "run 3")
    assert isinstance(refused.exception, Failed)
    assert "held by run 1 (until" in str(refused.exception)
    assert "run 1 holds the server no more; it stays, held by run 2" in run("stop", "--owner", "run 1").output
    assert "the server is stopped, nothing of it is left" in run("stop", "--force").output
    assert read_lease(server_folder()) is None
    assert "no server of ours runs" in run("stop").output


def test_reap_ends_what_a_killed_keeper_left_and_touches_no_living_one(
    ensure: Ensure, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing was left" in run("reap").output
    ensure("run 1", "ignores SIGTERM")
    assert "nothing to reap" in run("reap").output
    lease = read_lease(server_folder())
    assert lease is not None
    os.kill(lease.keeper.pid, signal.SIGKILL)
    client.wait_until_gone(lease.keeper, 10.0)
    assert "its keeper is gone: ./aerie server reap" in run("list").output
    monkeypatch.setattr(client, "GRACE_SECONDS", 1.0)
    said = run("reap").output
    assert f"its keeper {lease.keeper.pid} is gone; ended processes {lease.server.pid}" in said
    assert read_lease(server_folder()) is None


def test_ensure_refuses_a_hold_that_is_no_time(ensure: Ensure) -> None:
    assert "expected a number and s, m, h or d" in str(run("ensure", "--hold", "half a day").exception)


def test_a_server_of_somebody_else_is_not_said_to_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ServerHandle(
        url="http://gpu-7:30000", launch_token="external-1", folder=tmp_path, owner="me", log_path=None,
        max_total_num_tokens=4096, observation=None, reused=True, external_identity="1",
    )  # fmt: skip
    monkeypatch.setattr("aerie.server_commands._ensure_here", lambda *_, **__: theirs)
    done = run("ensure", "--owner", "me")
    assert "held by me" not in done.output
    assert "someone else's" in done.output
    assert done.stdout.splitlines()[-1] == theirs.url


def test_a_configuration_with_a_server_of_somebody_elses_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = (PROJECT_ROOT / "demo" / "config.yaml").read_text()
    external = "serving:\n  backend: external\n  external_url: http://gpu-7:30000\n"
    (tmp_path / "config.yaml").write_text(demo.replace("serving:\n", external, 1))
    monkeypatch.setenv("AERIE_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    for command in ("list", "stop"):
        assert "http://gpu-7:30000, which is somebody else's" in run(command).output


def test_ensure_elsewhere_renews_the_server_that_is_there(ensure: Ensure, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ensure("run 1")
    address = json.loads((server_folder() / "keeper.json").read_text())
    monkeypatch.setenv("AERIE_KEEPER_URL", address["url"])
    monkeypatch.setenv("AERIE_KEEPER_TOKEN_FILE", str(server_folder() / "keeper.token"))
    monkeypatch.setenv("AERIE_HOME", str(server_folder().parent / "another"))
    done = run("ensure", "--hold", "10m", "--owner", "a guest")
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines()[-1] == handle.url
    held = {holder["owner"]: holder for holder in json.loads(run("list", "--json").stdout)["holders"]}
    assert held["a guest"]["expires_at"] - held["a guest"]["since"] > 590
    monkeypatch.setenv("AERIE_HOME", str(server_folder().parent.parent))
