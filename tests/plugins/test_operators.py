from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException, AirflowSkipException

from aerie.artefacts.manifest import write_manifest
from aerie.errors import BadInput, Busy, Failed, Retryable
from aerie.pipeline import RunParameters, stage_request
from aerie.serving import client
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.stage_process import StageProcess
from aerie.stages import StageResult
from aerie_airflow.benchmarks import BenchmarkOperator
from aerie_airflow.log_groups import GroupedLog
from aerie_airflow.operators import StageOperator
from aerie_airflow.task_defaults import FAIL_FOR_GOOD

SETTINGS = load_settings(PROJECT_ROOT / "demo" / "config.yaml")


MANUAL_RUN = SimpleNamespace(run_type="manual", conf=None, start_date=None)


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


@pytest.mark.parametrize("wrong", [{"server_url": "http://x:1", "num_steps": 3}, {"datasets": ["no such data set"]}])
def test_parameters_that_make_no_benchmark_fail_the_measurement_alone(wrong, monkeypatch, database_url):
    monkeypatch.setenv("AERIE_CONFIG", str(PROJECT_ROOT / "demo" / "config.yaml"))
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    asked = {**context(**wrong), "triggering_asset_events": {}}
    with pytest.raises(BadInput) as failure:
        BenchmarkOperator(task_id="measure", stage="benchmark_drafter").execute(asked)
    with pytest.raises(AirflowSkipException) as skipped:
        BenchmarkOperator(task_id="stop_server", stage="serve_stop", phase="benchmark").execute(asked)
    assert str(skipped.value) == f"no server was started: {failure.value}"


def ran_into(monkeypatch, tmp_path, database_url, error):
    """What the operator raises whose stage raises ``error``, and what it logs."""
    for name, value in {"AERIE_DATABASE_URL": database_url, "AERIE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)

    def run(self):
        raise error

    monkeypatch.setattr(StageProcess, "run", run)
    operator = StageOperator(task_id="task", stage="validate", dataset="B1_glaive")
    lines = []

    def say(text, *values):
        lines.append(text % values if values else text)

    monkeypatch.setattr(StageOperator, "log", SimpleNamespace(info=say, error=say, warning=lambda text: None))
    with pytest.raises(Exception) as raised:
        operator.execute(context())
    return raised.value, lines


def test_a_data_set_that_another_run_works_on_is_waited_for_without_slot_pool_or_try(
    monkeypatch, tmp_path, database_url
):
    before = datetime.now(UTC)
    raised, lines = ran_into(monkeypatch, tmp_path, database_url, Busy("B1_glaive is being worked on by run other"))
    assert isinstance(raised, AirflowRescheduleException)
    assert timedelta(seconds=5) < raised.reschedule_date - before < timedelta(minutes=5)
    assert lines == ["waiting: B1_glaive is being worked on by run other; asked again in 30 s"]


def test_the_first_thing_that_a_failed_tasks_log_says_is_why(monkeypatch, tmp_path, database_url):
    raised, lines = ran_into(monkeypatch, tmp_path, database_url, BadInput("budget_tokens: expected a number"))
    assert isinstance(raised, BadInput)
    assert lines == ["budget_tokens: expected a number"]


def test_long_blocks_are_folded_and_progress_alerts_and_the_end_stay_outside():
    lines = []
    log = GroupedLog(SimpleNamespace(info=lambda text, *values: lines.append(text % values if values else text)))
    log.block("Settings", ["seed: 20", "name: 100%"])
    log.line("Progress: 1/40")
    log.line("Sample 1", group="Samples")
    log.line("Sample 2", group="Samples")
    log.line("Progress: 2/40")
    log.line("last", group="Plan")
    log.close()
    assert lines == [
        "::group::Settings", "seed: 20", "name: 100%", "::endgroup::", "Progress: 1/40", "::group::Samples", "Sample 1",
        "Sample 2", "::endgroup::", "Progress: 2/40", "::group::Plan", "last", "::endgroup::",
    ]  # fmt: skip


def test_what_airflow_keeps_of_a_stage_is_its_identity_and_single_values(tmp_path):
    manifest = write_manifest(
        tmp_path / "m.json", stage="prepare", edition="main", dataset="B1_glaive", fingerprint="f", inputs=[],
        outputs=[], counts={"rows": 511, "share": 0.5, "skipped_examples": {"too_long": list(range(1000))}},
    )  # fmt: skip
    kept = StageResult(stage="prepare", reused=False, manifest=manifest, data={"url": "http://h", "lease": {}}).brief
    assert kept.pop("finished_at")
    assert kept == {
        "reused": False, "fingerprint": "f", "counts": {"rows": 511, "share": 0.5}, "data": {"url": "http://h"},
    }  # fmt: skip


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
