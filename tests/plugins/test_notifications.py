import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from airflow.triggers.callback import CallbackTrigger

from aerie.alerting import Alert
from aerie.errors import Failed, Retryable
from aerie.settings.pipeline import AlertSettings
from aerie.store.connection import connected
from aerie.store.queries.alerts import list_alerts
from aerie.store.queries.runs import finish_run, read_run, record_run
from aerie_airflow import notifications
from aerie_airflow.notifications import (
    RunFailed,
    RunFailureNotifier,
    TaskAlerts,
    TaskFailureNotifier,
    run_deadline,
    send_alert,
)
from aerie_airflow.operators import CloseRunOperator, StageOperator
from aerie_dashboard.listing import run_line
from tests.receivers import SECRET, receiving

LOG_URL = "http://airflow/dags/pipeline/runs/r/tasks/B1_glaive.generate?try_number=1"
ALERT = Alert(
    reason="quarantine_rate",
    message="main/B1_glaive stopped by quarantine_rate: 31 %",
    run_id="r",
    edition="main",
    dataset="B1_glaive",
    stage="generate",
    task_id="B1_glaive.generate",
    try_number=1,
    log_url=LOG_URL,
)


@pytest.fixture
def store(database_url, monkeypatch):
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    with connected(database_url) as connection:
        yield connection


@pytest.fixture
def receiver():
    with receiving() as receiver:
        yield receiver


def connect(monkeypatch, *urls):
    extra = {"config": [{"path": url} for url in urls]}
    monkeypatch.setenv("AIRFLOW_CONN_AERIE_ALERTS", json.dumps({"conn_type": "apprise", "extra": extra}))


def rows(connection):
    return list(reversed(list_alerts(connection)))


def task_context(error=None, *, task_id="B1_glaive.generate", try_number=1):
    return {
        "exception": error,
        "params": {"edition": "main"},
        "task": SimpleNamespace(dataset="B1_glaive", stage="generate"),
        "ti": SimpleNamespace(run_id="r", task_id=task_id, try_number=try_number, log_url=LOG_URL),
    }


def run_context(**states):
    """What the closing task gets of a run; the states in the order of the DAG."""
    with DAG(dag_id="pipeline", schedule=None) as dag:
        for name in states:
            StageOperator(task_id=name, stage="generate", dataset="B1_glaive" if "." in name else None)
    instance = SimpleNamespace(run_id="r", dag_id="pipeline", get_task_states=lambda **_: {"r": states})
    began = datetime.now(UTC) - timedelta(minutes=1)
    run = SimpleNamespace(run_type="manual", conf={}, start_date=began)
    return {"dag": dag, "run_id": "r", "dag_run": run, "ti": instance, "params": {"edition": "main"}}


def close(**states):
    with pytest.raises(RunFailed) as failure:
        CloseRunOperator(task_id="close_run").execute(run_context(**states))
    TaskFailureNotifier()(task_context(failure.value, task_id="close_run"))


def end_in_the_dag_processor(task_id):
    """The DAG's callback, which Airflow calls at last, with the task that failed last."""
    context = run_context(**{task_id: "failed"})
    context["ti"] = SimpleNamespace(task_id=task_id)
    RunFailureNotifier()({**context, "reason": "task_failure"})


def open_run(connection):
    record_run(connection, run_id="r", dag_id="pipeline", edition="main", config={})


def test_an_alert_arrives_with_data_set_reason_first_useful_line_and_log(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    send_alert(store, ALERT)
    (message,) = receiver.messages
    assert message["title"] == "Aerie: quarantine rate (B1_glaive)"
    for fact in (ALERT.message, "Data set: B1_glaive", "Reason: quarantine_rate", f"Log: {LOG_URL}"):
        assert fact in message["message"]
    (row,) = rows(store)
    assert (row["task_id"], row["try_number"], row["log_url"]) == ("B1_glaive.generate", 1, LOG_URL)
    assert row["delivered_at"] is not None
    assert row["delivery_error"] is None


@pytest.mark.parametrize("behaviour", ["refuse", "hang"])
def test_a_receiver_that_fails_fails_no_task_and_is_told_in_row_and_log(
    store, receiver, monkeypatch, caplog, behaviour
):
    monkeypatch.setattr("aerie.delivery.DELIVERY_SECONDS", 0.5)
    connect(monkeypatch, receiver.url(behaviour), receiver.url("take"))
    send_alert(store, ALERT)
    assert len(receiver.messages) == 1, "a receiver that fails kept the message from another"
    (row,) = rows(store)
    assert row["delivered_at"] is not None
    assert "JSON (127.0.0.1" in row["delivery_error"]
    assert row["delivery_error"] in caplog.text
    assert SECRET not in caplog.text + str(row)


def test_a_connection_that_is_written_wrong_is_told_in_row_and_log(store, monkeypatch, caplog):
    monkeypatch.setenv("AIRFLOW_CONN_AERIE_ALERTS", json.dumps({"conn_type": "apprise", "extra": {"url": SECRET}}))
    send_alert(store, ALERT)
    (row,) = rows(store)
    assert row["delivered_at"] is None
    assert 'expected extra {"config"' in row["delivery_error"]
    assert row["delivery_error"] in caplog.text
    assert SECRET not in caplog.text


def test_without_a_connection_the_row_is_all_and_the_log_says_so_once(store, caplog):
    notifications._say_that_nobody_is_told.cache_clear()
    caplog.set_level(logging.INFO)
    send_alert(store, ALERT)
    send_alert(store, ALERT.model_copy(update={"reason": "canary", "message": "other"}))
    assert [row["delivery_error"] for row in rows(store)] == [None, None]
    assert caplog.text.count("there is no Airflow connection aerie_alerts") == 1
    assert all(record.levelno <= logging.INFO for record in caplog.records)


def test_a_task_tells_of_one_reason_once_and_of_its_failure_not_twice(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    send_alert(store, ALERT)
    send_alert(store, ALERT.model_copy(update={"message": "main/B1_glaive: 35 %", "try_number": 2}))
    TaskFailureNotifier()(task_context(Failed(ALERT.message)))
    assert len(receiver.messages) == 1
    assert [row["reason"] for row in rows(store)] == ["quarantine_rate", "quarantine_rate", "task_failed"]
    TaskFailureNotifier()(task_context(Failed(ALERT.message), try_number=3))
    assert len(receiver.messages) == 2, "a task that fails again after it was cleared tells nobody"


def test_an_alert_that_reached_nobody_is_told_again(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("refuse"))
    send_alert(store, ALERT)
    connect(monkeypatch, receiver.url("take"))
    send_alert(store, ALERT)
    assert len(receiver.messages) == 1


def test_one_failed_task_gives_one_message_and_the_run_a_row(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    open_run(store)
    TaskFailureNotifier()(task_context(Failed("no room for the server\nmore"), task_id="plan"))
    close(plan="failed", **{f"B{n}.generate": "upstream_failed" for n in range(1, 28)})
    end_in_the_dag_processor("close_run")
    (message,) = receiver.messages
    assert message["message"].startswith("no room for the server\n")
    assert "Reason: task_failed" in message["message"]
    _, run = rows(store)
    assert (run["reason"], run["edition"]) == ("run_failed", "main")
    assert run["message"] == "plan failed: no room for the server; 27 tasks were not run because of that"
    assert run["log_url"].endswith("/dags/pipeline/runs/r/tasks/plan")


def test_a_task_that_a_person_marked_failed_is_told_at_the_end_of_its_run(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    open_run(store)
    close(plan="success", **{"B1_glaive.generate": "failed"})
    end_in_the_dag_processor("close_run")
    (message,) = receiver.messages
    assert message["title"] == "Aerie: run failed (B1_glaive)"
    assert message["message"].startswith("B1_glaive.generate failed: it was ended from outside")
    assert "/runs/r/tasks/B1_glaive.generate" in message["message"]


def test_a_run_that_was_never_closed_is_told_by_the_dags_callback(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    end_in_the_dag_processor("open_run")
    (message,) = receiver.messages
    assert message["message"].startswith("open_run failed: it was ended from outside")


def test_a_run_that_was_never_closed_ends_in_the_store_as_it_did_in_airflow(store):
    open_run(store)
    end_in_the_dag_processor("open_run")
    row = read_run(store, run_id="r")
    assert row["state"] == "failed" and row["finished_at"] is not None
    line = run_line(row, {})
    assert line.summary is None, "a summary that nobody wrote is shown as one that cannot be read"


def test_a_run_that_was_closed_keeps_what_its_closing_task_wrote(store):
    open_run(store)
    finish_run(store, run_id="r", state="failed", summary={"datasets": {}, "benchmark": None})
    end_in_the_dag_processor("close_run")
    assert read_run(store, run_id="r")["summary"]


def test_a_store_that_goes_away_while_a_run_is_ended_there_hides_no_alert(store, receiver, monkeypatch, caplog):
    connect(monkeypatch, receiver.url("take"))
    open_run(store)

    def gone(*_, **__):
        raise Retryable("the connection to the database broke")

    monkeypatch.setattr("aerie.store.queries.runs.finish_run", gone)
    end_in_the_dag_processor("open_run")
    assert len(receiver.messages) == 1
    assert "not recorded in the store: the connection to the database broke" in caplog.text


def test_a_run_that_is_cleared_and_ends_unclosed_is_told_again(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    open_run(store)
    finish_run(store, run_id="r", state="failed", summary={})
    with store, store.cursor() as cursor:
        cursor.execute("UPDATE runs SET finished_at = now() - interval '1 hour'")
    end_in_the_dag_processor("close_run")
    assert len(receiver.messages) == 1


def test_a_callback_tells_without_the_store_too(receiver, monkeypatch, caplog):
    connect(monkeypatch, receiver.url("take"))
    monkeypatch.setenv("AERIE_DATABASE_URL", f"postgresql://aerie:{SECRET}@127.0.0.1:9/aerie")
    TaskFailureNotifier()(task_context(Failed("no room"), task_id="plan"))
    assert len(receiver.messages) == 1
    assert "not recorded in the store" in caplog.text
    assert SECRET not in caplog.text


def test_an_alert_about_a_configuration_that_is_wrong_is_sent(store, receiver, monkeypatch, tmp_path, caplog):
    wrong = tmp_path / "config.yaml"
    wrong.write_text("name: 1")
    monkeypatch.setenv("AERIE_CONFIG", str(wrong))
    connect(monkeypatch, receiver.url("take"))
    send_alert(store, ALERT)
    assert len(receiver.messages) == 1
    assert "alerts go to connection aerie_alerts, because the configuration is wrong" in caplog.text


def test_a_notifier_can_be_awaited_in_the_triggerer(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    asyncio.run(TaskFailureNotifier().async_notify(task_context(Failed("no room"), task_id="plan")))
    assert len(receiver.messages) == 1


def watching(store, *, deadline_hours, started):
    request = SimpleNamespace(
        run_id="r",
        edition="main",
        dataset="B1_glaive",
        settings=SimpleNamespace(alerts=AlertSettings(deadline_hours=deadline_hours)),
    )
    context = {**task_context(), "dag_run": SimpleNamespace(start_date=started)}
    return TaskAlerts(store, request, stage="generate", context=context)


def test_an_end_expected_after_the_deadline_is_told_once_with_both_figures(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    started = datetime.now(UTC)
    figures = {"dataset": "B1_glaive", "eta_low_seconds": 2 * 3600, "eta_high_seconds": 3 * 3600}
    for _ in range(2):  # two tries of the task
        alerts = watching(store, deadline_hours=1.0, started=started)
        alerts.watch({"message": "the canary passed"})
        alerts.watch({**figures, "eta_low_seconds": 60.0})
        assert len(receiver.messages) <= 1
        alerts.watch(figures)
        alerts.watch(figures)
    (message,) = receiver.messages
    assert message["title"] == "Aerie: deadline at risk (B1_glaive)"
    assert f"the run's deadline at {started + timedelta(hours=1):%Y-%m-%d %H:%M}" in message["message"]
    assert f"{started + timedelta(hours=2):%Y-%m-%d %H:}" in message["message"]
    assert len(rows(store)) == 2


def test_without_a_deadline_no_end_is_too_late(store):
    watching(store, deadline_hours=None, started=datetime.now(UTC)).watch({"eta_low_seconds": 1e9})
    assert rows(store) == []
    assert run_deadline(AlertSettings()) is None


def test_a_missed_deadline_is_told_by_the_triggerer_from_the_document_that_it_has(store, receiver, monkeypatch):
    connect(monkeypatch, receiver.url("take"))
    callback = run_deadline(AlertSettings(deadline_hours=2)).callback
    run = {"dag_id": "pipeline", "dag_run_id": "r", "state": "running"}
    context = {"dag_run": run, "deadline": {"id": "1", "deadline_time": datetime(2026, 11, 30, 10, tzinfo=UTC)}}
    trigger = CallbackTrigger(callback.path, {**callback.kwargs, "context": context})

    async def run_trigger():
        return [event.payload["state"] async for event in trigger.run()]

    assert asyncio.run(run_trigger()) == ["running", "success"]
    (message,) = receiver.messages
    assert message["title"] == "Aerie: deadline missed"
    assert "the run is running at its deadline, 2026-11-30 10:00 UTC" in message["message"]
    assert "/dags/pipeline/runs/r" in message["message"]
    assert rows(store)[0]["reason"] == "deadline_missed"
