from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowSkipException

from aerie.errors import BadInput, Failed, Retryable
from aerie.pipeline import RunParameters, stage_request
from aerie.serving import client
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie_airflow.operators import FAIL_FOR_GOOD, StageOperator

SETTINGS = load_settings(PROJECT_ROOT / "demo" / "config.yaml")


MANUAL_RUN = SimpleNamespace(run_type="manual", conf=None)


def context(**params):
    instance = SimpleNamespace(run_id="test", task_id="task", dag_id="dag", try_number=1)
    return {"params": params, "dag_run": MANUAL_RUN, "ti": instance}


def test_a_task_of_a_data_set_that_was_not_selected_is_skipped():
    operator = StageOperator(task_id="task", stage="prepare", dataset="B2_opencodeinstruct")
    with pytest.raises(AirflowSkipException, match="not part of this run"):
        operator.execute(context(datasets=["B1_glaive"]))


def test_a_task_before_the_runs_first_step_does_nothing_and_holds_nobody_up():
    operator = StageOperator(task_id="task", stage="prepare", dataset="B1_glaive")
    assert operator.execute(context(**{"from": "merge"}))["reused"] is True


def test_an_edition_that_would_leave_the_data_root_is_refused():
    operator = StageOperator(task_id="task", stage="prepare", dataset="B1_glaive")
    with pytest.raises(BadInput, match="edition"):
        operator.execute(context(edition="../../etc"))


@pytest.mark.parametrize(
    ("error", "action"), [(BadInput("x"), "fail"), (Failed("x"), "fail"), (Retryable("x"), "default")]
)
def test_only_what_may_succeed_is_tried_again(error, action):
    assert FAIL_FOR_GOOD.evaluate(error, try_number=1, max_tries=3).action.value == action


@pytest.mark.parametrize(("stage", "released"), [("serve_start", ["run 1"]), ("generate", [])])
def test_only_a_start_that_is_ended_gives_the_runs_hold_up(monkeypatch, stage, released):
    """No teardown follows it; while a data set's end leaves the server to the others."""
    stopped, given_up = [], []
    monkeypatch.setattr(client, "release", lambda folder, owner: given_up.append(owner))
    operator = StageOperator(task_id="task", stage=stage)
    operator._process = SimpleNamespace(
        stop=lambda: stopped.append(True), request=stage_request(SETTINGS, RunParameters(), run_id="run 1")
    )
    operator.on_kill()
    assert (stopped, given_up) == ([True], released)
