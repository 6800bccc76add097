"""The keeper over real SGLang and the tiny verifier that ships with Aerie; in the serve environment."""

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

from aerie.serving import client
from aerie.serving.client import ServerHandle
from aerie.serving.launch import port_is_free
from aerie.serving.lease import lease_path, read_lease
from aerie.serving.plan import ServerPlan, checkpoint_identity
from aerie.serving.stopping import family_of
from aerie.settings.machine import PROJECT_ROOT

START_SECONDS = 800.0
VERIFIER = PROJECT_ROOT / "demo" / "tiny_verifier"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is in the serve environment"),
]


def ensure(folder: Path) -> ServerHandle:
    plan = ServerPlan(
        model_path=VERIFIER,
        model_identity=checkpoint_identity(VERIFIER),
        dtype="float32",
        phase="generate",
        device="cpu",
        mem_fraction_static=0.1,
        max_total_tokens=8192,
        context_length=1024,
    )
    return client.ensure_server(
        plan,
        folder=folder,
        owner="a test",
        python=Path(sys.executable),
        lease_seconds=120.0,
        start_timeout_seconds=START_SECONDS,
    )


def test_server_lives_and_ends_with_its_keeper(folder: Path) -> None:
    handle = ensure(folder)
    assert handle.max_total_num_tokens == 8192
    assert ensure(folder).reused
    sampling = {"temperature": 0.8, "max_new_tokens": 20, "ignore_eos": True}
    reply = requests.post(
        f"{handle.url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling}, timeout=120
    ).json()
    assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] == 20

    lease = read_lease(folder)
    assert lease is not None
    assert len(family_of(lease.server, lease.launch_token)) >= 3  # HTTP, scheduler, detokenizer
    os.kill(lease.keeper.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while family_of(lease.server, lease.launch_token) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert family_of(lease.server, lease.launch_token) == []

    second = ensure(folder)
    assert second.launch_token != handle.launch_token
    lease = read_lease(folder)
    assert lease is not None
    family = family_of(lease.server, lease.launch_token)
    assert client.stop(folder)
    assert family_of(lease.server, lease.launch_token) == []
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert port_is_free("127.0.0.1", lease.port)
    assert not lease_path(folder).exists()
