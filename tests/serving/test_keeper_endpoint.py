"""The keeper's HTTP endpoint: who is let in, and what a user who has only its address and token can do."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from aerie.errors import BadInput
from aerie.serving import client
from aerie.serving.errors import KeeperUnreachable
from aerie.serving.lease import read_address, token_path
from aerie.serving.plan import INCLUDE

from .helpers import Ensure, Make, Processes, until


def test_endpoint_refuses_strangers(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    ensure(fake_plan())
    assert stat.S_IMODE(token_path(folder).stat().st_mode) == 0o600
    address = read_address(folder)
    assert address is not None
    for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer \xe9"}):
        response = requests.post(f"{address.url}/stop", json={"launch_token": None}, headers=headers, timeout=5)
        assert response.status_code == 401
    token = token_path(folder).read_text()
    token_path(folder).write_text("guess\n")
    with pytest.raises(KeeperUnreachable, match="refuses the token"):
        client.find_keeper(folder)
    token_path(folder).write_text(token)


def test_malformed_request_is_answered_and_harmless(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    ensure(fake_plan())
    address = read_address(folder)
    assert address is not None
    headers = {"Authorization": f"Bearer {token_path(folder).read_text()}"}
    response = requests.post(f"{address.url}/ensure", data=b"{", headers=headers, timeout=5)
    assert response.status_code == 400
    assert response.json()["error"] == "BadInput"
    assert ensure(fake_plan()).reused


ELSEWHERE = """
import sys
from pathlib import Path
from aerie.processes import ProcessIdentity
from aerie.serving import client, leftovers, stopping

def looked(*_, **__):
    raise AssertionError("looked at processes of another host")

ProcessIdentity.find = ProcessIdentity.of = looked
client.subprocess.Popen = looked
nowhere = Path(sys.argv[1])
lease = client.status(nowhere)
handle = client.ensure_server(lease.plan, folder=nowhere, owner="a guest", python=Path("/nowhere"), report=print)
client.renew(handle)
print(handle.url, handle.launch_token, handle.reused)
if "release" in sys.argv:
    left = client.release(nowhere, "a guest")
    print("left:", left and left.held_by)
"""


@pytest.fixture
def elsewhere(folder: Path, tmp_path: Path) -> Callable[..., str]:
    """What a user prints who has another home, and of the keeper only its address and a copy of its token."""

    def run(*arguments: str) -> str:
        address = read_address(folder)
        assert address is not None
        home = tmp_path / "another-home"
        home.mkdir(exist_ok=True)
        (home / "token").write_text(token_path(folder).read_text() + "\n")
        environment = {
            "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", str(INCLUDE)), "HOME": str(home),
            "AERIE_HOME": str(home), "AERIE_KEEPER_URL": address.url, "AERIE_KEEPER_TOKEN_FILE": str(home / "token"),
        }  # fmt: skip
        command = [sys.executable, "-c", ELSEWHERE, str(home / "server"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not (home / "server").exists()
        return done.stdout

    return run


def test_a_user_of_another_host_holds_renews_and_lets_go_through_the_endpoint_alone(
    ensure: Ensure, fake_plan: Make, folder: Path, elsewhere: Callable[..., str]
) -> None:
    handle = ensure(fake_plan(), owner="run 1")
    said = elsewhere("release")
    assert f"{handle.url} {handle.launch_token} True" in said
    assert "left: run 1 (until" in said
    client.renew(handle)


def test_a_user_of_another_host_starts_a_server_again_that_has_died(
    ensure: Ensure, fake_plan: Make, folder: Path, elsewhere: Callable[..., str], processes_of: Processes
) -> None:
    handle = ensure(fake_plan(), owner="run 1", lease_seconds=100.0)
    for process in processes_of():
        process.kill()
    assert until(lambda: (lease := client.status(folder)) is not None and lease.state == "failed")
    said = elsewhere()
    assert handle.launch_token not in said
    lease = client.status(folder)
    assert lease is not None
    assert (lease.state, [holder.owner for holder in lease.holders]) == ("ready", ["a guest"])


def test_a_keeper_elsewhere_without_a_token_is_refused_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AERIE_KEEPER_URL", "http://gpu-7:4711")
    monkeypatch.delenv("AERIE_KEEPER_TOKEN", raising=False)
    monkeypatch.delenv("AERIE_KEEPER_TOKEN_FILE", raising=False)
    with pytest.raises(BadInput, match="AERIE_KEEPER_URL is set without a token"):
        client.remote_keeper()
    monkeypatch.setenv("AERIE_KEEPER_TOKEN_FILE", "/nowhere/token")
    with pytest.raises(BadInput, match="AERIE_KEEPER_TOKEN_FILE /nowhere/token: No such file"):
        client.remote_keeper()


def test_a_keeper_for_other_hosts_takes_their_token_and_outlives_a_hold_that_ran_out(
    ensure: Ensure, fake_plan: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AERIE_KEEPER_TOKEN", "a token that both hosts have")
    first = ensure(fake_plan(), owner="run 1", lease_seconds=1.0, keeper_stays=True)
    keeper = read_address(folder)
    assert until(lambda: client.status(folder) is None), "the server outlived its hold"
    token_path(folder).unlink()  # another user's: who has the token needs no file
    again = client.ensure_server(fake_plan(), folder=folder, owner="run 1", python=None)
    assert again.launch_token != first.launch_token
    assert read_address(folder) == keeper
    client.release(folder, "run 1")
    assert until(lambda: read_address(folder) is None), "the keeper stayed after its run had let go"
    with pytest.raises(KeeperUnreachable, match="the server's host starts it in the task start_server"):
        client.ensure_server(fake_plan(), folder=folder, owner="run 1", python=None)
