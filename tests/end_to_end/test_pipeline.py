"""One real run: Airflow, PostgreSQL, SGLang, a real verifier, from prompts to a benchmarked drafter."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psycopg2
import pytest

from aerie.local.airflow_api import AirflowApi
from aerie.settings.machine import PROJECT_ROOT, aerie_home

HOME = aerie_home() / "test-stack"
DAG_ID = "eagle3_pipeline"
KEYS = ["B1_glaive", "A1"]
EDITION = "end_to_end"


def aerie(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AERIE_", "AIRFLOW"))},
        "AERIE_HOME": str(HOME),
        "AERIE_CONFIG": str(Path(__file__).parent / "config.yaml"),
    }
    command = [str(PROJECT_ROOT / "aerie"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def stack():
    """A stack of its own beside the one that a person may have running."""
    if HOME.exists():
        aerie("down", "--purge")
    HOME.mkdir(parents=True, exist_ok=True)
    if not (HOME / "envs").exists():
        (HOME / "envs").symlink_to(aerie_home() / "envs")
    try:
        started = aerie("up")
        assert started.returncode == 0, started.stderr
        yield json.loads((HOME / "stack.json").read_text())
    finally:
        stopped = aerie("down", "--purge")
    assert stopped.returncode == 0, stopped.stderr


@pytest.fixture(scope="module")
def api(stack):
    return AirflowApi(f"http://127.0.0.1:{stack['airflow_port']}", stack["airflow_password"])


def run_to_its_end(api: AirflowApi) -> tuple[dict, list[dict]]:
    from aerie.local.watched_run import wait_for_dag, watch

    wait_for_dag(api, DAG_ID)
    run_id = api.trigger(DAG_ID, {"datasets": KEYS, "edition": EDITION})
    messages: list[str] = []
    database_url = database(json.loads((HOME / "stack.json").read_text()))
    run = watch(api, database_url, run_id, messages.append)
    assert run["state"] == "success", "\n".join(messages)
    return run, api.tasks(DAG_ID, run_id)


def database(stack: dict) -> str:
    return f"postgresql://aerie:{stack['postgres_password']}@127.0.0.1:{stack['postgres_port']}/aerie"


@pytest.fixture(scope="module")
def first_run(api):
    return run_to_its_end(api)


def query(stack: dict, statement: str, *values: object) -> list[tuple]:
    connection = psycopg2.connect(database(stack))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchall()
    finally:
        connection.close()


@pytest.mark.timeout(1200)
def test_prompts_become_a_measured_drafter(stack, first_run):
    run, tasks = first_run
    states = {task["task_id"]: task["state"] for task in tasks}
    assert states["B2_opencodeinstruct.generate"] == "skipped"
    assert states["benchmark"] == states["publish"] == "success"
    ((summary,),) = query(stack, "SELECT summary FROM runs WHERE run_id = %s", run["dag_run_id"])
    generated = summary["datasets"]["B1_glaive"]
    assert generated["stopped_by"] == "budget"
    assert generated["generated"] < generated["prompts"]
    assert generated["response_tokens"] >= generated["budget"]
    assert generated["reasoning_share"] == 1.0
    assert summary["datasets"]["A1"]["stopped_by"] == "imported"
    assert summary["hidden_states"]["files"] == summary["corpus"]["rows"]
    assert summary["training"]["last_loss"] < summary["training"]["first_loss"]
    assert summary["benchmark"]["acceptance_length"] > 1.1
    assert summary["benchmark"]["lossless"] is True


def check_log_equals_ledger(stack: dict, edition: str) -> None:
    rows = query(
        stack,
        "SELECT sample_id, state, completion_tokens FROM samples WHERE edition = %s AND dataset = 'B1_glaive'",
        edition,
    )
    states = {sample_id: state for sample_id, state, _ in rows}
    assert len(states) == len(rows)
    log = HOME / "data" / "editions" / edition / "datasets" / "B1_glaive" / "responses.jsonl"
    responses = [json.loads(line) for line in log.read_text().splitlines()]
    answered = {response["sample_id"]: len(response["output_ids"]) for response in responses}
    assert len(answered) == len(responses)
    assert answered == {sample_id: tokens for sample_id, state, tokens in rows if state in ("kept", "quarantined")}


def test_every_prompt_is_in_exactly_one_state_and_the_log_agrees_with_the_ledger(stack, first_run):
    check_log_equals_ledger(stack, EDITION)


def test_the_servers_are_gone_after_the_run(first_run):
    assert not (HOME / "server" / "lease.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_run_of_the_same_edition_finds_everything_done(api, stack, first_run):
    _, tasks = run_to_its_end(api)
    done = [task for task in tasks if task["state"] == "success"]
    longest = max(task["duration"] for task in done)
    assert longest < 60, {task["task_id"]: task["duration"] for task in done}
    run_id = tasks[0]["dag_run_id"]
    for task_id in ("B1_glaive.generate", "A1.validate", "merge", "capture", "train", "benchmark"):
        log = "\n".join(api.log(DAG_ID, run_id, task_id, 1))
        assert "nothing to do" in log, task_id


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_generating_task_that_is_ended_is_tried_again_and_goes_on_from_its_ledger(api, stack):
    from aerie.local.watched_run import wait_for_dag

    wait_for_dag(api, DAG_ID)
    edition, task_id = "ended", "B1_glaive.generate"
    conf = {"datasets": ["B1_glaive"], "edition": edition, "budget_tokens": 0, "to": "validate"}
    run_id = api.trigger(DAG_ID, conf)

    def kept() -> int:
        statement = "SELECT count(*) FROM samples WHERE edition = %s AND state = 'kept'"
        return query(stack, statement, edition)[0][0]

    def task() -> dict:
        return next(task for task in api.tasks(DAG_ID, run_id) if task["task_id"] == task_id)

    def ended() -> bool:
        return api.run(DAG_ID, run_id)["state"] in ("success", "failed")

    until(lambda: kept() >= 20 or ended())
    os.kill(task()["pid"], signal.SIGTERM)
    until(lambda: (task()["try_number"] == 2 and task()["state"] == "running") or ended())
    before = kept()
    assert 0 < before < 120, "the task was not ended in the middle"
    until(ended)
    assert api.run(DAG_ID, run_id)["state"] == "success"
    check_log_equals_ledger(stack, edition)


def until(condition) -> None:
    while not condition():  # bounded by the test's own limit
        time.sleep(0.2)
