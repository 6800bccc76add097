"""Where a run waits for a person, and what becomes of the answer, on a real PostgreSQL without an Airflow server."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from airflow.providers.standard.operators import hitl
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped, TaskAwaitingInput

from aerie.errors import Failed
from aerie.settings.machine import PROJECT_ROOT
from aerie.store.connection import connected
from aerie.store.queries.decisions import list_decisions
from aerie.store.queries.manifests import record_manifest
from aerie_airflow.approvals import GateOperator
from aerie_airflow.task_defaults import ASKED_AGAIN_TIMES
from tests.stages.test_approvals import EDITION


@pytest.fixture(scope="module")
def dag():
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(str(PROJECT_ROOT / "dags")).dags["eagle3_pipeline"]


class Asked:
    """A run that comes to its gate; keeps what Airflow is told."""

    def __init__(self, dag, connection):
        self.connection = connection
        self.detail = None
        self.xcoms = {}
        self.task = dag.get_task("approve_publish")

    def context(self, **params):
        instance = SimpleNamespace(
            id="id", run_id="run 1", task_id=self.task.task_id, map_index=-1,
            xcom_push=lambda key, value: self.xcoms.update({key: value}),
            xcom_pull=lambda task_ids, key: self.xcoms[key],
        )  # fmt: skip
        run = SimpleNamespace(run_type="manual", conf={}, start_date=None)
        return {"params": params, "ti": instance, "task_instance": instance, "dag_run": run, "task": self.task}

    def ask(self, **params):
        self.task.execute(self.context(**params))

    def answer(self, option):
        event = {
            "chosen_options": [option], "params_input": {}, "responded_by_user": {"id": "7", "name": "ada"},
            "responded_at": datetime(2026, 12, 1, 12, tzinfo=UTC), "timedout": False,
        }  # fmt: skip
        return self.task.execute_complete(self.context(approvals=True), event)

    @property
    def decisions(self):
        return [
            (row["approved"], row["decided_by"], row["subject"])
            for row in list_decisions(self.connection, run_id="run 1")
        ]


@pytest.fixture
def asked(monkeypatch, database_url, dag):
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    with connected(database_url) as connection:
        for manifest in EDITION.values():
            record_manifest(connection, manifest, "run 1")
        made = Asked(dag, connection)
        monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **detail: setattr(made, "detail", detail))
        yield made


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, "approvals are off"),
        ({"approvals": True, "pilot": True}, "pilot"),
        ({"approvals": True, "to": "train"}, "not part"),
    ],
)
def test_nobody_is_asked_where_the_run_does_not_ask(asked, params, why):
    with pytest.raises(AirflowSkipException, match=why):
        asked.ask(**params)
    assert asked.detail is None


def test_a_person_is_asked_with_the_acceptance_table_and_without_holding_a_slot(asked):
    with pytest.raises(TaskAwaitingInput):
        asked.ask(approvals=True)
    assert asked.detail["subject"] == "Publish drafter main-abcdef012345?"
    assert "| B1_glaive | 8 | 2.69 |" in asked.detail["body"]
    assert asked.detail["options"] == ["Approve", "Reject"]


def test_an_approval_goes_on_and_says_whose_it_was(asked):
    with pytest.raises(TaskAwaitingInput):
        asked.ask(approvals=True)
    asked.answer("Approve")
    assert asked.decisions == [(True, "ada", "Publish drafter main-abcdef012345?")]


def test_a_rejection_skips_every_step_after_it_and_no_teardown(asked, dag):
    with pytest.raises(TaskAwaitingInput):
        asked.ask(approvals=True)
    with pytest.raises(DownstreamTasksSkipped) as skipped:
        asked.answer("Reject")
    assert skipped.value.tasks == ["publish"]
    assert asked.decisions == [(False, "ada", "Publish drafter main-abcdef012345?")]
    after_capture = {task.task_id for task in dag.get_task("approve_capture").get_flat_relatives(upstream=False)}
    assert {
        "start_server_capture",
        "capture",
        "train",
        "start_server_benchmark",
        "benchmark",
        "publish",
    } < after_capture


def test_nobodys_answer_fails_for_good_and_says_how_to_be_asked_again(asked):
    with pytest.raises(Failed, match=r"nobody approved or rejected publish: .*Clear this task"):
        asked.task.execute_complete(
            asked.context(approvals=True), {"error": "The timeout has passed.", "error_type": "timeout"}
        )
    assert asked.decisions == []


def test_a_gate_that_asks_nobody_does_not_keep_the_next_step_from_running(dag):
    assert dag.get_task("start_server_capture").trigger_rule == "none_failed"
    assert dag.get_task("publish").trigger_rule == "none_failed"
    assert isinstance(dag.get_task("approve_capture"), GateOperator)


def test_a_gate_asks_again_after_more_lost_answers_than_a_stage_is_tried(dag):
    assert dag.get_task("approve_publish").retries == ASKED_AGAIN_TIMES > dag.get_task("merge").retries
