import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from aerie.errors import BadInput, Busy, Failed, Retryable
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
    for name in ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW_CONN_AERIE_ALERTS", "AERIE_DATABASE_OWNER_URL"):
        monkeypatch.setenv(name, "postgresql://owner:hunter3@host/db")
    assert not any("hunter" in value for value in variables_of("model").values())
    assert "AERIE_DATABASE_URL" in variables_of("airflow")
    assert not any("hunter3" in value for value in variables_of("airflow").values())


@pytest.mark.parametrize(("status", "kind"), [(1, Failed), (2, BadInput), (75, Retryable), (76, Busy), (3, Failed)])
def test_a_stages_exit_code_is_the_class_of_its_error(status, kind, make_request, tmp_path, monkeypatch):
    python = tmp_path / "python"
    event = '{"type": "error", "message": "what a person needs"}'
    python.write_text(f"""#!/bin/sh
while [ "$1" != --events ]; do shift; done
echo '{event}' >> "$2"
exit {status}
""")
    python.chmod(0o755)
    monkeypatch.setenv("AERIE_AIRFLOW_PYTHON", str(python))
    with pytest.raises(kind, match="what a person needs") as raised:
        StageProcess("plan", make_request(), tmp_path / "run", lambda event: None).run()
    assert type(raised.value) is kind


@pytest.fixture
def endless_stage(tmp_path, monkeypatch):
    """Stages of the airflow environment report once and never end; returns what waits for one and tells who it is."""
    python, pid = tmp_path / "python", tmp_path / "pid"
    event = '{"type": "progress", "message": "working"}'
    python.write_text(f"""#!/bin/sh
echo $$ > {pid}.new && mv {pid}.new {pid}
while [ "$1" != --events ]; do shift; done
echo '{event}' >> "$2"
exec sleep 600
""")
    python.chmod(0o755)
    monkeypatch.setenv("AERIE_AIRFLOW_PYTHON", str(python))

    def started() -> ProcessIdentity:
        while not pid.exists():  # bounded by the test's own limit
            time.sleep(0.02)
        return ProcessIdentity.of(int(pid.read_text()))

    return started


CALLER = """
import sys
from pathlib import Path
from aerie.stage_process import StageProcess
from aerie.stages import StageRequest
request = StageRequest.model_validate_json(Path(sys.argv[1]).read_bytes())
StageProcess("plan", request, Path(sys.argv[2]), lambda event: None).run()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("killed", ["the caller", "the caller's parent"])
def test_no_stage_outlives_its_task_or_the_worker_of_its_task(killed, make_request, tmp_path, endless_stage):
    path = tmp_path / "request.json"
    path.write_text(make_request().model_dump_json())
    call = [sys.executable, "-c", CALLER, str(path), str(tmp_path / "run")]
    command = call if killed == "the caller" else ["sh", "-c", '"$@"; exit $?', "worker", *call]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        stage = endless_stage()
        process.kill()
    assert wait_until_gone(stage, 20)


@pytest.mark.timeout(60)
def test_no_stage_outlives_a_failure_to_report_what_it_does(make_request, tmp_path, endless_stage):
    stages = []

    def fail_to_report(event):
        stages.append(endless_stage())
        raise RuntimeError("the store cannot be reached")

    with pytest.raises(RuntimeError, match="the store cannot be reached"):
        StageProcess("plan", make_request(), tmp_path / "run", fail_to_report).run()
    assert stages[0].find() is None
