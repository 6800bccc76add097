"""A task on a host without the database, and the control-side task that records what it left beside the data."""

import json
from types import SimpleNamespace

import pytest

from aerie.artefacts.manifest import describe_output, write_manifest
from aerie.errors import BadInput, Failed, Retryable
from aerie.remote import leave_mark, shared_run_folder
from aerie.settings.machine import PROJECT_ROOT, settings_path
from aerie.settings.pipeline import load_settings
from aerie.stage_process import StageProcess
from aerie.stages import StageResult
from aerie.store.connection import connected
from aerie.store.queries.alerts import list_alerts
from aerie_airflow import notifications
from aerie_airflow.notifications import Delivery, TaskFailureNotifier
from aerie_airflow.operators import OpenRunOperator, RecordOperator, StageOperator, record_remote

DEAD = "postgresql://nobody:nothing@127.0.0.1:9/aerie"
PLACEMENT = "placement: {train: {queue: gpu-1, remote: true}, capture: {queue: gpu-1, remote: true}, "
SERVER = "serve_start: {queue: gpu-1, remote: true}, serve_stop: {queue: gpu-1, remote: true}}"
EVENTS = (
    {"type": "progress", "time": 1.0, "message": "half of it"},
    {"type": "metric", "time": 2.0, "figures": {"loss": 3.5}},
    {"type": "alert", "time": 3.0, "reason": "loss_rises", "message": "the loss rises"},
)


def context(task_id, try_number=1):
    instance = SimpleNamespace(run_id="run 1", task_id=task_id, dag_id="dag", try_number=try_number, log_url=None)
    run = SimpleNamespace(run_type="manual", conf=None)
    return {"params": {"edition": "far"}, "dag_run": run, "ti": instance}


@pytest.fixture(autouse=True)
def control(monkeypatch, tmp_path, database_url):
    configuration = tmp_path / "config.yaml"
    demo = (PROJECT_ROOT / "demo" / "config.yaml").read_text().replace("path: ", f"path: {PROJECT_ROOT}/demo/")
    configuration.write_text(f"{demo}\n{PLACEMENT}{SERVER}\n")
    root = tmp_path / "data"
    for name, value in {
        "AERIE_CONFIG": configuration, "AERIE_HOME": tmp_path / "home", "AERIE_DATA_ROOT": root,
        "AERIE_SERVER_FOLDER": root / "server", "AERIE_DATABASE_URL": database_url,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))


def leave(folder, request, events=EVENTS, *, result=True):
    """What a stage leaves: its request, its events, and the manifest of a file that it wrote."""
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(request.model_dump_json())
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if not result:
        return None
    weights = request.data_root / "weights.bin"
    weights.write_text("weights")
    manifest = write_manifest(
        request.files.manifest("train"), stage="train", edition=request.edition, dataset=None, fingerprint="f",
        inputs=[], outputs=[describe_output(weights)], counts={"steps": 3, "first_loss": 2.0, "last_loss": 1.0},
    )  # fmt: skip
    answer = StageResult(stage="train", reused=False, manifest=manifest)
    (folder / "result.json").write_text(answer.model_dump_json(by_alias=True))
    return answer


@pytest.fixture
def elsewhere(monkeypatch):
    """Trains on a host whose database URL leads nowhere, as another user with another home."""

    def train(*, try_number=1, error=None):
        def run(self):
            answer = leave(self.folder, self.request, result=error is None)
            for event in EVENTS:
                self.on_event(event)
            if error is not None:
                raise error
            return answer

        with monkeypatch.context() as host:
            host.setenv("AERIE_DATABASE_URL", DEAD)
            host.setenv("AERIE_HOME", "/nowhere")
            host.setattr(StageProcess, "run", run)
            return StageOperator(task_id="train", stage="train").execute(context("train", try_number))

    return train


def record():
    return RecordOperator(task_id="record_train", stage="train", recorded="train").execute(context("record_train"))


def rows(database_url):
    tables = ("manifests", "interval_metrics", "alerts", "recorded_tries")
    with connected(database_url) as connection, connection.cursor() as cursor:
        counts = {}
        for table in tables:
            cursor.execute(f"SELECT count(*) FROM {table}")  # noqa: S608 - the names stand above
            counts[table] = cursor.fetchone()[0]
        return counts


def test_a_host_without_the_database_works_and_the_control_side_records_it_once(elsewhere, database_url):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    assert elsewhere()["counts"]["steps"] == 3
    assert rows(database_url) == {"manifests": 0, "interval_metrics": 0, "alerts": 0, "recorded_tries": 0}
    record()
    once = rows(database_url)
    assert once == {"manifests": 1, "interval_metrics": 1, "alerts": 1, "recorded_tries": 1}
    record()
    assert rows(database_url) == once


def test_the_events_of_a_try_that_failed_are_recorded_with_those_of_the_next(elsewhere, database_url):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    with pytest.raises(Retryable):
        elsewhere(error=Retryable("a GPU fell off the bus"))
    elsewhere(try_number=2)
    record()
    assert rows(database_url) == {"manifests": 1, "interval_metrics": 2, "alerts": 2, "recorded_tries": 2}


def fail_for_good(elsewhere, error):
    """Fail the task as Airflow does on the host: the error, then its callback."""
    with pytest.raises(type(error)):
        elsewhere(error=error)
    with pytest.MonkeyPatch.context() as host:
        host.setenv("AERIE_DATABASE_URL", DEAD)
        task = StageOperator(task_id="train", stage="train")
        TaskFailureNotifier().notify({**context("train"), "task": task, "exception": error})


def left_failures(database_url):
    instance = context("close_run")["ti"]
    with connected(database_url) as connection:
        record_remote(connection, "train", "train", instance, finished=False)
        return [
            (row["reason"], row["message"], row["try_number"], row["delivered_at"] is not None)
            for row in list_alerts(connection, run_id="run 1")
            if row["reason"] == "task_failed"
        ]


def test_a_failure_that_its_host_could_not_tell_is_told_and_recorded_once_by_the_control_side(
    elsewhere, database_url, monkeypatch
):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    fail_for_good(elsewhere, Failed("the loss is no number"))
    told = []
    monkeypatch.setattr(notifications, "deliver_alert", lambda alert: told.append(alert.message))
    expected = [("task_failed", "the loss is no number", 1, False)]
    assert [left_failures(database_url), left_failures(database_url)] == [expected, expected]
    assert told.count("the loss is no number") == 1


def test_a_failure_that_its_host_has_told_is_recorded_and_not_told_again(elsewhere, database_url, monkeypatch):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    told = []

    def deliver(alert):
        told.append(alert.message)
        return Delivery(delivered=True, error=None)

    monkeypatch.setattr(notifications, "deliver_alert", deliver)
    fail_for_good(elsewhere, Failed("the loss is no number"))
    assert left_failures(database_url) == [("task_failed", "the loss is no number", 1, True)]
    assert told.count("the loss is no number") == 1


def test_a_failure_before_the_stage_was_asked_is_recorded_too(elsewhere, database_url):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    settings_path().write_text(settings_path().read_text().replace("seed: ", "seed: 9", 1))
    with pytest.raises(BadInput) as refused:
        elsewhere()
    task = StageOperator(task_id="train", stage="train")
    TaskFailureNotifier().notify({**context("train"), "task": task, "exception": refused.value})
    ((_, message, _, _),) = left_failures(database_url)
    assert "is not the configuration" in message


def test_a_host_that_does_not_see_the_control_sides_data_says_so_before_it_works(elsewhere):
    with pytest.raises(BadInput, match=r"run\.json: No such file.*AERIE_DATA_ROOT"):
        elsewhere()


def test_a_host_with_another_configuration_says_what_differs(elsewhere):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    settings_path().write_text(settings_path().read_text().replace("seed: ", "seed: 9", 1))
    with pytest.raises(BadInput, match=r"is not the configuration that .* opened the run with: seed"):
        elsewhere()


def test_a_host_that_looks_for_the_server_elsewhere_says_where(elsewhere, monkeypatch):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    monkeypatch.setenv("AERIE_SERVER_FOLDER", "/nowhere/server")
    with pytest.raises(BadInput, match="AERIE_SERVER_FOLDER is /nowhere/server on host"):
        elsewhere()


def test_a_servers_folder_that_no_other_host_sees_is_refused_when_the_run_opens(monkeypatch):
    monkeypatch.delenv("AERIE_SERVER_FOLDER")
    with pytest.raises(BadInput, match="not below the data root"):
        leave_mark(load_settings(settings_path()), "run 1")


def test_a_result_that_cannot_be_seen_is_not_recorded_as_done(elsewhere, database_url):
    OpenRunOperator(task_id="open_run").execute(context("open_run"))
    with pytest.raises(Retryable, match="no result of a try"):
        record()
    elsewhere()
    folder = shared_run_folder("run 1") / "train" / "try-1"
    weights = folder.parents[3] / "weights.bin"
    weights.write_text("torn")
    with pytest.raises(Retryable, match=r"weights\.bin: expected 7 bytes .* found 4"):
        record()
    weights.write_text("weights")
    (folder / "result.json").write_text("{")
    with pytest.raises(Failed, match=r"result\.json: damaged"):
        record()
    assert rows(database_url)["manifests"] == 0
