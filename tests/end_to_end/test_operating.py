"""What people do with the pipeline in Airflow: ask for it wrongly, repair a run, backfill one data set, clear, approve.

Backfills share an edition: the later ones find what the first one made, and need no server.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aerie.errors import BadInput
from aerie.local.watched_run import DAG_ID, wait_for_dag
from aerie.serving.lease import read_lease
from aerie.settings.machine import PROJECT_ROOT

from ..chromium import WIDTH, take_screenshots
from ..receivers import SECRET, Receiver, receiving
from .conftest import HOME, Run, Stack, aerie, signed_in, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
DATASET = "B3_magicoder"
ONE_DATASET = {"datasets": [DATASET]}
EDITION = "operated"
TOKEN = "for-nobody-to-see"
SOURCE = HOME / f"source?token={TOKEN}" / "rows.jsonl"
START, STOP = "start_server_generate", "stop_server_generate"
PREPARE, GENERATE, VALIDATE = f"{DATASET}.prepare", f"{DATASET}.generate", f"{DATASET}.validate"
USERS_DAG = "after_validation"


def put_source() -> None:
    """What a person does where the file of a data set is missing."""
    SOURCE.parent.mkdir(exist_ok=True)
    shutil.copy(PROJECT_ROOT / "demo" / "sources" / "b3_magicoder.jsonl", SOURCE)


@pytest.fixture
def source() -> None:
    put_source()


@contextmanager
def open_dag(stack: Stack, browser: "Browser") -> Iterator["Page"]:
    """The pipeline's page in Airflow, of a person who has just logged in."""
    wait_for_dag(stack.api, DAG_ID)
    with signed_in(stack, browser, f"/dags/{DAG_ID}") as page:
        page.set_viewport_size({"width": WIDTH, "height": 1500})  # a dialog is photographed as far as it is in sight
        page.get_by_test_id("trigger-dag-button").wait_for()
        yield page


@pytest.fixture
def receiver(stack: Stack) -> Iterator[Receiver]:
    """Somebody who is told of alerts, and a receiver that is out of order, in one Airflow connection."""
    with receiving() as opened:
        config = [{"path": opened.url(behaviour)} for behaviour in ("take", "refuse")]
        connection = {"connection_id": "aerie_alerts", "conn_type": "apprise", "extra": json.dumps({"config": config})}
        stack.api.call("POST", "/connections", body=connection)
        yield opened
        stack.api.call("DELETE", "/connections/aerie_alerts")


def open_form(page: "Page") -> "Locator":
    page.get_by_test_id("trigger-dag-button").click()
    form = page.get_by_role("dialog")
    form.get_by_label(f"Remove {DATASET}").wait_for()
    return form


def runs(stack: Stack, dag_id: str = DAG_ID) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.api.call("GET", f"/dags/{dag_id}/dagRuns", query={"limit": 100})["dag_runs"]
    return found


def backfilled(stack: Stack, day: str, edition: str) -> Run:
    """The run of a backfill of one day."""

    def found() -> list[str]:
        return [run["dag_run_id"] for run in runs(stack) if str(run["logical_date"]).startswith(day)]

    until(found)
    (run_id,) = found()
    assert stack.api.run(DAG_ID, run_id)["run_type"] == "backfill"
    return Run(stack, run_id, edition)


def request_of_backfill(day: str, **conf: object) -> dict[str, object]:
    return {"dag_id": DAG_ID, "from_date": f"{day}T00:00:00Z", "to_date": f"{day}T00:00:00Z", "dag_run_conf": conf}


def wait_until_airflow_takes_another_backfill(stack: Stack) -> None:
    """Airflow has one of a DAG at a time, and notices some time after its runs that it is over."""

    def completed() -> list[object]:
        found = stack.api.call("GET", "/backfills", query={"dag_id": DAG_ID})["backfills"]
        return [backfill["completed_at"] for backfill in found]

    until(lambda: all(completed()))


def alerts_of(run: Run, reason: str) -> list[dict[str, Any]]:
    """Alerts of a run in the store, once there is one."""
    statement = "SELECT to_jsonb(alerts) FROM alerts WHERE run_id = %s AND reason = %s"
    until(lambda: run.stack.query(statement, run.run_id, reason))
    return [row for (row,) in run.stack.query(statement, run.run_id, reason)]


def told(receiver: Receiver, title: str) -> str:
    """The one message with this title that arrives."""

    def messages() -> list[str]:
        return [message["message"] for message in receiver.messages if message["title"].startswith(title)]

    until(messages)
    (message,) = messages()
    return str(message)


def check_no_log_has(*secrets: str) -> None:
    """No log of the stack has a secret: of tasks, of what they started, of Airflow's components."""
    logs = {path: path.read_text(errors="replace") for path in HOME.rglob("*.log")}
    assert [path for path, text in logs.items() if any(secret in text for secret in secrets)] == []


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"datasets": ["B9_unknown"]}, "'B9_unknown' is not one of ['B1_glaive', 'B3_magicoder', 'A1']"),
        ({"datasets": []}, "[] should be non-empty"),
        ({"budget_tokens": -1}, "-1 is less than the minimum of 0"),
        ({"edition": "../elsewhere"}, "'../elsewhere' does not match"),
        ({"to": "the_end"}, "'the_end' is not one of"),
    ],
)
def test_a_wrong_value_is_refused_with_the_schemas_words(stack, conf, said):
    wait_for_dag(stack.api, DAG_ID)
    before = len(runs(stack))
    for method, path, body in (
        ("POST", f"/dags/{DAG_ID}/dagRuns", {"logical_date": None, "conf": conf}),
        ("POST", "/backfills", request_of_backfill("2026-01-01", **conf)),
    ):
        with pytest.raises(BadInput) as refusal:
            stack.api.call(method, path, body=body)
        assert re.search(r"\(4\d\d\)", str(refusal.value))
        assert said in str(refusal.value), path
    assert len(runs(stack)) == before


def test_the_form_explains_its_fields_and_a_wrong_value_starts_nothing(stack, browser):
    before = len(runs(stack))
    with open_dag(stack, browser) as page:
        form = open_form(page)
        for key in ("B1_glaive", DATASET, "A1"):
            assert form.get_by_label(f"Remove {key}").is_visible(), "the data sets are not a multi-select"
        for explained in ("Data sets that this run works on", "Label of one population", "Kept response tokens"):
            assert form.get_by_text(explained).is_visible()
        take_screenshots(page, "airflow_trigger_form")
        form.locator("#element_edition").fill("Not A Label")
        form.get_by_role("button", name="Trigger", exact=True).click()
        page.get_by_text("'Not A Label' does not match").first.wait_for()
        take_screenshots(page, "airflow_trigger_form_refused")
        form.get_by_text("Which steps").click()
        form.get_by_text("First step; what comes before it is left as it is").wait_for()
    assert len(runs(stack)) == before


def test_a_task_that_fails_is_told_of_without_secrets_and_goes_on_when_what_failed_is_cleared(stack, receiver, browser):
    shutil.rmtree(SOURCE.parent, ignore_errors=True)
    run = stack.trigger(**ONE_DATASET, edition="repaired", to="prepare")
    run.must_end_as("failed")
    assert (run.task_state(PREPARE), run.task(PREPARE)["try_number"]) == ("failed", 1), "it was tried again in vain"

    message = told(receiver, "Aerie: task failed")
    first, *facts = message.splitlines()
    assert "no such file or folder" in first
    known = dict(fact.split(": ", 1) for fact in facts if fact)
    assert (known["Data set"], known["Reason"], known["Edition"]) == (DATASET, "task_failed", "repaired")
    log = run.log(PREPARE, 1)
    assert "no such file or folder" in log
    assert "was not delivered everywhere" in log, "nothing is told of the receiver that refused"
    (row,) = alerts_of(run, "task_failed")
    assert (row["message"], row["log_url"]) == (first, known["Log"])
    for text in (message, log, json.dumps(row)):
        assert TOKEN not in text and SECRET not in text
    with open_dag(stack, browser) as page:
        page.goto(known["Log"])
        page.get_by_text("no such file or folder").first.wait_for()
        take_screenshots(page, "airflow_failed_task")

    put_source()
    run.clear_only_failed()
    run.must_end_as("success")
    tries = {task: run.task(task)["try_number"] for task in ("open_run", "plan", PREPARE)}
    assert tries == {"open_run": 1, "plan": 1, PREPARE: 2}, "more than what failed was done again"
    assert "max_new_tokens: 320" in run.log(PREPARE, 2), "the log does not say what the task was asked"
    check_no_log_has(TOKEN, SECRET)


def test_a_test_alert_says_who_took_it(stack, receiver):
    done = aerie("alerts", "test")
    assert "This is a test of Aerie's alerts" in told(receiver, "Aerie: test")
    assert "delivered" in done.stdout
    assert (done.returncode, "1 of 2 receivers did not take the message" in done.stderr) == (1, True)
    assert SECRET not in done.stdout + done.stderr


def test_a_backfill_from_the_form_outwaits_a_run_of_its_data_set_which_is_marked_failed(
    stack, source, receiver, browser
):
    running = stack.trigger(**ONE_DATASET, edition=EDITION, budget_tokens=0, to="validate")
    with open_dag(stack, browser) as page:
        form = fill_in_backfill(page, "2026/02/01")
        page.context.set_offline(True)  # or it asks Airflow for news all the while, and the server starts the later
        running.until(running.kept)
        page.context.set_offline(False)
        form.get_by_role("button", name="Run Backfill").click()
        waiting = backfilled(stack, "2026-02-01", EDITION)
    running.until(lambda: waiting.task_state(PREPARE) == "up_for_reschedule")
    running.fail()
    running.must_end_as("failed")
    assert (running.task_state(GENERATE), running.task_state(STOP)) == ("failed", "success")
    (row,) = alerts_of(running, "run_failed")
    assert GENERATE in row["message"]
    message = told(receiver, "Aerie: run failed")
    assert GENERATE in message and running.run_id in message
    lease = read_lease(stack.server_folder)
    assert lease is None or running.run_id not in lease.held_by, "a failed run holds the server"

    waiting.must_end_as("success")
    assert stack.api.run(DAG_ID, waiting.run_id)["conf"]["datasets"] == [DATASET]
    states = waiting.states()
    assert {states[task] for task in (PREPARE, GENERATE, VALIDATE, STOP)} == {"success"}
    assert states["merge"] == states["publish"] == states["B1_glaive.generate"] == "skipped", "it did not end there"
    assert waiting.task(PREPARE)["try_number"] == 1, "waiting used up a try"
    assert f"being worked on by run {running.run_id}" in waiting.log(PREPARE, 1)
    waiting.check_log_equals_ledger(DATASET)
    assert stack.served() == []
    expected = {"run_id": waiting.run_id, "edition": EDITION, "dataset": DATASET}
    until(lambda: any(expected.items() <= facts.items() for facts in users_dag_saw(stack)))


def fill_in_backfill(page: "Page", day: str) -> "Locator":
    """Fill in Airflow's form for one day of one data set, up to the button that runs it."""
    form = open_form(page)
    form.get_by_text("Backfill", exact=True).click()
    for position in (0, 1):
        form.get_by_test_id("datetime-input").nth(position).click()
        date = page.get_by_placeholder("YYYY/MM/DD")
        date.fill(day)
        date.press("Enter")
        page.keyboard.press("Escape")
    # Airflow sends the form's parameters only then, new runs or not.
    form.locator("label").filter(has_text="Override parameters on existing runs").click()
    for key in ("B1_glaive", "A1"):
        form.get_by_label(f"Remove {key}").click()
    form.locator("#element_edition").fill(EDITION)
    take_screenshots(page, "airflow_backfill_form")
    return form


def users_dag_saw(stack: Stack) -> list[dict[str, Any]]:
    """What the runs of the DAG that is scheduled on the data set's asset were told of it."""
    path = f"/dags/{USERS_DAG}/dagRuns/{{}}/taskInstances/look/xcomEntries/return_value"
    ended = [run["dag_run_id"] for run in runs(stack, USERS_DAG) if run["state"] == "success"]
    answers = [stack.api.call("GET", path.format(run_id), query={"deserialize": True}) for run_id in ended]
    return [facts for answer in answers for facts in answer["value"]]


def test_a_backfill_by_command_ends_with_validate_and_its_cleared_group_repeats_nothing(stack, source):
    wait_until_airflow_takes_another_backfill(stack)
    done = aerie(
        "airflow", "backfill", "create", "--dag-id", DAG_ID, "--from-date", "2026-02-02", "--to-date", "2026-02-02",
        "--dag-run-conf", json.dumps({**ONE_DATASET, "edition": EDITION}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = backfilled(stack, "2026-02-02", EDITION)
    run.must_end_as("success")
    assert (run.task_state(VALIDATE), run.task_state("merge")) == ("success", "skipped")

    kept = run.kept()
    run.clear(PREPARE, GENERATE, VALIDATE)
    run.must_end_as("success")
    tries = {task: run.task(task)["try_number"] for task in (START, PREPARE, GENERATE, VALIDATE, STOP, "plan")}
    assert tries == {START: 2, PREPARE: 2, GENERATE: 2, VALIDATE: 2, STOP: 2, "plan": 1}
    for task in (PREPARE, GENERATE, VALIDATE):
        assert "nothing to do" in run.log(task, 2), task
    assert run.kept() == kept
    run.check_log_equals_ledger(DATASET)
    assert stack.served() == []


def test_a_backfill_by_rest_asks_a_person_and_ends_as_they_decide(stack):
    conf = {"datasets": ["A1"], "edition": "approved", "to": "capture", "approvals": True}
    wait_until_airflow_takes_another_backfill(stack)
    stack.api.call("POST", "/backfills", body=request_of_backfill("2026-02-03", **conf))
    run = backfilled(stack, "2026-02-03", "approved")
    run.decide("approve_capture", "Reject")
    run.must_end_as("success")
    assert run.task_state("forecast") == "success"
    assert run.task_state("capture") == "skipped"
    assert set(stack.query("SELECT approved FROM decisions WHERE run_id = %s", run.run_id)) == {(False,)}
    assert "rejected" in alerts_of(run, "rejected")[0]["message"]

    run.clear("approve_capture", downstream=True)
    run.decide("approve_capture", "Approve")
    run.must_end_as("success")
    assert (run.task_state("capture"), run.task_state("train")) == ("success", "skipped")
    ((summary,),) = stack.query("SELECT summary FROM runs WHERE run_id = %s", run.run_id)
    assert summary["hidden_states"]["files"] == summary["corpus"]["rows"]
    assert stack.served() == []


def test_the_pipeline_never_starts_by_itself(stack):
    dag = stack.api.call("GET", f"/dags/{DAG_ID}")
    assert (dag["is_paused"], dag["next_dagrun_run_after"], dag["timetable_summary"]) == (False, None, "On demand")
    assert {run["run_type"] for run in runs(stack)} == {"manual", "backfill"}
