import os
import signal
import threading
import time

import pytest

from aerie.errors import BadInput, Retryable
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
