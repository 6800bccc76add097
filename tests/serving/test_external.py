"""A server that someone else owns: checked, used, and left as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.serving import client
from aerie.serving.client import ServerHandle
from aerie.serving.errors import NotReady, ServerDied, WrongServer
from aerie.serving.launch import Launched, wait_until_ready
from aerie.serving.plan import ServerPlan
from aerie.serving.stopping import stop_server

from .helpers import Launch, Make

Use = Callable[[Launched, ServerPlan], ServerHandle]


@pytest.fixture
def theirs(launch: Launch, fake_plan: Make, tmp_path: Path) -> Launched:
    """A server that somebody else has started."""
    launched = launch(fake_plan())
    wait_until_ready(launched, fake_plan(), folder=tmp_path, timeout_seconds=20)
    return launched


@pytest.fixture
def use(folder: Path) -> Use:
    """Uses somebody else's server as one of the plan."""
    folder.mkdir()
    return lambda launched, plan: client.use_external(launched.url, plan, folder=folder, owner="run 1")


def test_a_server_that_is_as_planned_is_used_and_left_running(
    theirs: Launched, use: Use, fake_plan: Make, folder: Path
) -> None:
    handle = use(theirs, fake_plan())
    assert (handle.url, handle.max_total_num_tokens, handle.reused) == (theirs.url, 4096, True)
    assert handle.launch_token.startswith("external-")
    with client.held(handle, lease_seconds=0.2):
        assert client.renew(handle) is None
    assert not client.stop(folder)  # there is nothing of ours
    theirs.require_alive()


def test_every_difference_from_the_plan_is_named(theirs: Launched, use: Use, fake_plan: Make) -> None:
    with pytest.raises(WrongServer) as refused:
        use(theirs, fake_plan(context_length=8192, dtype="float16"))
    assert "dtype is 'bfloat16', expected 'float16'" in str(refused.value)
    assert "context_length is 4096, expected 8192" in str(refused.value)
    theirs.require_alive()


def test_capture_wants_the_hooks_and_nothing_else_does(theirs: Launched, use: Use, fake_plan: Make) -> None:
    hooks = ({"name": "capture"},)
    with pytest.raises(WrongServer, match=r"forward_hooks is None, expected \[\{'name': 'capture'\}\]"):
        use(theirs, fake_plan(phase="capture", forward_hooks=hooks))


def test_hooks_are_refused_where_they_would_write_at_every_request(
    theirs: Launched, use: Use, fake_plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {**client.external.server_info(theirs.url), "forward_hooks": '[{"name": "capture"}]'}
    monkeypatch.setattr(client.external, "server_info", lambda url: info)
    with pytest.raises(WrongServer, match=r"forward_hooks is \[\{'name': 'capture'\}\], expected \[\]"):
        use(theirs, fake_plan())


def test_a_server_that_its_owner_started_anew_is_not_the_same(
    theirs: Launched, use: Use, launch: Launch, fake_plan: Make, tmp_path: Path
) -> None:
    handle = use(theirs, fake_plan())
    stop_server(theirs.identity, theirs.token, grace_seconds=1)
    theirs.process.wait()
    with pytest.raises(NotReady):
        client.renew(handle)
    again = launch(fake_plan(port=theirs.port))
    wait_until_ready(again, fake_plan(), folder=tmp_path, timeout_seconds=20)
    with pytest.raises(ServerDied, match="its owner has started it anew"):
        client.renew(handle)
    assert use(again, fake_plan()).launch_token != handle.launch_token


def test_nonsense_from_a_server_of_somebody_else_is_refused(
    use: Use, launch: Launch, fake_plan: Make, tmp_path: Path
) -> None:
    broken = launch(fake_plan("constant answer"))
    with pytest.raises(WrongServer, match="whatever the prompt"):
        wait_until_ready(broken, fake_plan(), folder=tmp_path, timeout_seconds=20)
    with pytest.raises(WrongServer, match="whatever the prompt"):
        use(broken, fake_plan())
