"""The keeper over real SGLang and the tiny verifier that ships with Aerie; in the serve environment."""

import importlib.util
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from aerie.ports import port_is_free
from aerie.processes import ProcessIdentity
from aerie.serving import client
from aerie.serving.client import ServerHandle
from aerie.serving.errors import NotReady, ServerDied, WrongServer
from aerie.serving.lease import Lease, lease_path, read_lease, write
from aerie.serving.plan import ServerPlan, checkpoint_identity
from aerie.serving.stopping import family_of
from aerie.settings.machine import PROJECT_ROOT

from .helpers import runs, until

START_SECONDS = 800.0
VERIFIER = PROJECT_ROOT / "demo" / "tiny_verifier"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is in the serve environment"),
]


def plan_of(max_total_tokens: int = 8192) -> ServerPlan:
    return ServerPlan(
        model_path=VERIFIER,
        model_identity=checkpoint_identity(VERIFIER),
        dtype="float32",
        phase="generate",
        device="cpu",
        mem_fraction_static=0.1,
        max_total_tokens=max_total_tokens,
        context_length=1024,
    )


def ensure(folder: Path, owner: str = "run 1", **changes: Any) -> ServerHandle:
    return client.ensure_server(
        changes.pop("plan", plan_of()),
        folder=folder,
        owner=owner,
        python=Path(sys.executable),
        lease_seconds=120.0,
        start_timeout_seconds=START_SECONDS,
        **changes,
    )


def lease_of(folder: Path) -> Lease:
    lease = read_lease(folder)
    assert lease is not None
    return lease


def test_server_lives_and_ends_with_its_keeper_and_its_holders(folder: Path) -> None:
    handle = ensure(folder)
    assert handle.max_total_num_tokens == 8192
    assert ensure(folder).reused
    sampling = {"temperature": 0.8, "max_new_tokens": 20, "ignore_eos": True}
    reply = requests.post(
        f"{handle.url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling}, timeout=120
    ).json()
    assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] == 20

    crashed = lease_of(folder)
    assert len(family_of(crashed.server, crashed.launch_token)) >= 3  # HTTP, scheduler, detokenizer
    os.kill(crashed.keeper.pid, signal.SIGKILL)
    assert until(lambda: not family_of(crashed.server, crashed.launch_token), 60)

    # As after a crash of the host: the lease is there, and its pids are those of others by now.
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"], start_new_session=True)
    try:
        write(crashed.model_copy(update={"server": ProcessIdentity.of(innocent.pid)}), lease_path(folder))
        second = ensure(folder)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()
    assert second.launch_token != handle.launch_token

    # Another run shares it, somebody uses it as a server that is not his, and a third run wants another plan.
    assert ensure(folder, "run 2").launch_token == second.launch_token
    theirs = client.use_external(second.url, plan_of(), folder=folder, owner="a guest")
    client.renew(theirs)
    with pytest.raises(WrongServer, match="context_length is 1024, expected 2048"):
        client.use_external(
            second.url, plan_of().model_copy(update={"context_length": 2048}), folder=folder, owner="a guest"
        )
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(ensure, folder, "run 3", plan=plan_of(4096), report=lines.append)
        assert until(lambda: [one.owner for one in lease_of(folder).waiting] == ["run 3"], 30)
        lease, family = lease_of(folder), family_of(lease_of(folder).server)
        left = client.release(folder, "run 1")
        assert left is not None
        assert [holder.owner for holder in left.holders] == ["run 2"]
        assert client.release(folder, "run 2") is None
        assert not any(map(runs, family))
        assert port_is_free(lease.port)
        assert third.result().max_total_num_tokens == 4096
    assert "is held by run 1 (until" in lines[0]
    with pytest.raises((NotReady, ServerDied)):
        client.renew(theirs)

    lease = lease_of(folder)
    family = family_of(lease.server, lease.launch_token)
    assert client.release(folder, "run 3") is None
    assert family_of(lease.server, lease.launch_token) == []
    assert not any(map(runs, family))
    assert lease.keeper.find() is None
    assert port_is_free(lease.port)
    assert not lease_path(folder).exists()
