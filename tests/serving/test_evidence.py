"""What the keeper tells of a server that is to be ended for being stuck."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from aerie.serving import client
from aerie.serving.errors import LeaseLost, WrongServer
from aerie.serving.probing import Probing

from .helpers import Ensure, Make, Processes

PY_SPY = """#!/bin/sh
test "$3" != {hidden} || {{ echo "Permission denied" >&2; exit 1; }}
echo "Process $3: python: $1 --pid $3"
"""


def test_log_processes_stacks_and_the_last_probe_are_told(
    ensure: Ensure,
    fake_plan: Make,
    folder: Path,
    processes_of: Processes,
    probing: Probing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    lines: list[str] = []
    handle = ensure(fake_plan(probing=probing), report=lines.append)
    server, worker = sorted(processes_of(), key=lambda process: process.create_time())
    (tools / "py-spy").write_text(PY_SPY.format(hidden=server.pid))
    (tools / "py-spy").chmod(0o755)
    with handle.log_path.open("a") as log:
        log.write("the last line that says something\n")
        log.writelines('INFO:     127.0.0.1:5 - "GET /metrics HTTP/1.1" 200 OK\n' for _ in range(300))
    worker.send_signal(signal.SIGSTOP)
    found = client.evidence(folder, handle.launch_token)
    assert found.log_tail[0].startswith("$ ") and handle.launch_token in found.log_tail[0]
    assert found.log_tail[-1] == "the last line that says something"
    told = {line.split()[1]: line for line in found.processes}
    assert told.keys() == {str(server.pid), str(worker.pid)}
    assert f": {psutil.STATUS_STOPPED}, " in told[str(worker.pid)]
    assert found.stacks is not None
    assert f"Process {worker.pid}: python: dump" in found.stacks
    assert f"pid {server.pid}: py-spy ended with status 1: Permission denied" in found.stacks
    assert found.last_probe is not None
    (replica,) = found.last_probe.replicas
    assert any(line.endswith(f"proven: {replica.told}") for line in lines)
    assert "answered in 33 tokens (stop); a passage's mean log-probability -2.5000 nats" in replica.told
    assert replica.answer is not None and replica.answer.finish == "stop"
    assert replica.score is not None and replica.score.computed == -2.5


def test_without_py_spy_there_are_no_stacks(
    ensure: Ensure, fake_plan: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    handle = ensure(fake_plan())
    assert client.evidence(folder, handle.launch_token).stacks is None


def test_a_launch_that_was_replaced_has_no_evidence(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    with pytest.raises(LeaseLost, match="the keeper of launch-1 is gone"):
        client.evidence(folder, "launch-1")
    ensure(fake_plan())
    with pytest.raises(LeaseLost, match="server launch-1 was ended or replaced"):
        client.evidence(folder, "launch-1")


def test_a_launch_that_is_proven_wrong_ends_and_says_why(
    ensure: Ensure, fake_plan: Make, probing: Probing, processes_of: Processes
) -> None:
    ensure(fake_plan(probing=probing))
    with pytest.raises(WrongServer, match=r"-2\.6000 nats .* had -2\.5000 nats"):
        ensure(fake_plan("less likely", probing=probing))
    assert processes_of() == []
