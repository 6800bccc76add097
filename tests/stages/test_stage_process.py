import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from aerie.errors import BadInput, Retryable
from aerie.processes import ProcessIdentity, wait_until_gone
from aerie.settings.machine import variables_of
from aerie.stage_process import StageProcess


def test_a_stages_own_message_is_the_error_that_the_caller_sees(make_request, settings, tmp_path):
    verifier = settings.verifier.model_copy(update={"path": tmp_path / "nowhere"})
    request = make_request(settings.model_copy(update={"verifier": verifier}))
    with pytest.raises(BadInput, match=r"no generate server can be planned: .*nowhere"):
        StageProcess("plan", request, tmp_path / "run", lambda event: None).run()


def test_events_reach_the_caller_and_the_result_comes_back(make_request, tmp_path):
    events = []
    result = StageProcess("plan", make_request(), tmp_path / "run", events.append).run()
    assert result.data["bytes_per_token"] == 2 * 3 * 32 * 8 * 4  # key and value, heads, width, layers, float32
    assert any("launch_server.py" in event["message"] for event in events)


def test_a_stage_that_the_kernel_kills_is_worth_a_retry(make_request, tmp_path):
    process = StageProcess("plan", make_request(), tmp_path / "run", lambda event: None)

    def kill_as_soon_as_it_runs():
        while process._process is None:
            time.sleep(0.001)
        os.kill(process._process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_as_soon_as_it_runs)
    killer.start()
    with pytest.raises(Retryable, match="SIGKILL"):
        process.run()
    killer.join()


def test_a_dead_environment_is_named(make_request, tmp_path, monkeypatch):
    monkeypatch.setenv("AERIE_AIRFLOW_PYTHON", str(tmp_path / "python"))
    with pytest.raises(BadInput, match="the airflow environment is not there"):
        StageProcess("plan", make_request(), tmp_path / "run", lambda event: None).run()


def test_secrets_of_the_control_side_stay_there(monkeypatch):
    monkeypatch.setenv("AERIE_DATABASE_URL", "postgresql://aerie:hunter2@host/db")
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql://aerie:hunter2@host/db")
    assert not any("hunter2" in value for value in variables_of("model").values())
    assert "AERIE_DATABASE_URL" in variables_of("airflow")


CALLER = """
import sys
from pathlib import Path
from aerie.stage_process import StageProcess
from aerie.stages import StageRequest
folder = Path(sys.argv[1])
StageProcess("plan", StageRequest.model_validate_json((folder / "asked.json").read_bytes()), folder, print).run()
"""


def test_a_stage_ends_with_a_worker_that_was_killed(make_request, tmp_path, monkeypatch):
    """It would hold the server, and the data set's writer lock, against the next try."""
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(f'#!/bin/sh\necho $$ > "{started}.new"\nmv "{started}.new" "{started}"\nexec sleep 600\n')
    python.chmod(0o755)
    monkeypatch.setenv("AERIE_AIRFLOW_PYTHON", str(python))
    (tmp_path / "asked.json").write_text(make_request().model_dump_json())
    worker = subprocess.Popen([sys.executable, "-c", CALLER, str(tmp_path)])
    try:
        until(started.exists)
        stage = ProcessIdentity.of(int(started.read_text()))
        assert stage.find() is not None
    finally:
        worker.kill()
        worker.wait()
    assert wait_until_gone(stage, 10)


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
