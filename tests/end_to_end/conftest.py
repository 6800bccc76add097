"""One running stack for the tests of a session: Airflow, PostgreSQL, and SGLang servers as its runs start them."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg2
import pytest

from aerie.errors import Retryable
from aerie.local.airflow_api import TERMINAL_RUN_STATES, AirflowApi
from aerie.local.watched_run import DAG_ID, wait_for_dag, watch
from aerie.settings.machine import PROJECT_ROOT, aerie_home

from ..chromium import browser, open_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]

HOME = aerie_home() / "test-stack"


def aerie(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AERIE_", "AIRFLOW"))},
        "AERIE_HOME": str(HOME),
        "AERIE_CONFIG": str(Path(__file__).parent / "config.yaml"),
    }
    command = [str(PROJECT_ROOT / "aerie"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)


def until(condition: Callable[[], Any]) -> None:
    while not condition():  # bounded by the test's own limit
        time.sleep(0.5)  # Airflow answers while the runs need the same two cores


@dataclass(frozen=True)
class Stack:
    """A stack of its own beside the one that a person may have running."""

    api: AirflowApi
    database_url: str
    airflow_url: str
    password: str

    @property
    def server_folder(self) -> Path:
        return HOME / "server"

    def served(self) -> list[str]:
        """Keepers of the stack, and servers with what they spawned, whoever their parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
                keeps = "aerie.serving.keeper" in command and str(self.server_folder) in command
                if keeps or Path(process.cwd()).is_relative_to(self.server_folder):
                    found.append(f"{process.pid}: {' '.join(command)}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or of another user and none of ours
                continue
        return found

    def trigger(self, **conf: Any) -> "Run":
        wait_for_dag(self.api, DAG_ID)
        return Run(self, self.api.trigger(DAG_ID, conf), conf["edition"])

    def run_to_its_end(self, **conf: Any) -> "Run":
        run = self.trigger(**conf)
        messages: list[str] = []
        ended = watch(self.api, self.database_url, run.run_id, messages.append)
        assert ended["state"] == "success", "\n".join(messages)
        return run

    def query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        connection = psycopg2.connect(self.database_url)
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute(statement, values)
                return cursor.fetchall()
        finally:
            connection.close()


@dataclass(frozen=True)
class Run:
    """A run of the pipeline."""

    stack: Stack
    run_id: str
    edition: str

    @property
    def state(self) -> str:
        return str(self.stack.api.run(DAG_ID, self.run_id)["state"])

    @property
    def has_ended(self) -> bool:
        return self.state in TERMINAL_RUN_STATES

    def tasks(self) -> dict[str, dict[str, Any]]:
        return {task["task_id"]: task for task in self.stack.api.tasks(DAG_ID, self.run_id)}

    def task(self, task_id: str) -> dict[str, Any]:
        return self.tasks()[task_id]

    def task_state(self, task_id: str) -> str | None:
        state: str | None = self.task(task_id)["state"]
        return state

    def log(self, task_id: str, attempt: int) -> str:
        return "\n".join(self.stack.api.log(DAG_ID, self.run_id, task_id, attempt))

    def kept(self) -> int:
        statement = "SELECT count(*) FROM samples WHERE edition = %s AND state = 'kept'"
        count: int = self.stack.query(statement, self.edition)[0][0]
        return count

    def fail_task(self, task_id: str) -> None:
        """What a person's "mark as failed" does."""
        path = f"/dags/{DAG_ID}/dagRuns/{self.run_id}/taskInstances/{task_id}"
        self.stack.api.call("PATCH", path, body={"new_state": "failed"})

    def clear(self, *task_ids: str, downstream: bool = False) -> None:
        """What a person's "clear" of some tasks does, with what is after them or without."""
        body = {
            "dag_run_id": self.run_id, "task_ids": task_ids, "include_downstream": downstream,
            "only_failed": False, "dry_run": False,
        }  # fmt: skip
        self.stack.api.call("POST", f"/dags/{DAG_ID}/clearTaskInstances", body=body)

    def clear_only_failed(self) -> None:
        """What a person's "clear only failed tasks" of the whole run does."""
        body = {"only_failed": True, "dry_run": False}
        self.stack.api.call("POST", f"/dags/{DAG_ID}/dagRuns/{self.run_id}/clear", body=body)

    def is_asked(self, gate: str) -> bool:
        """Whether a person is asked, and has not answered."""
        return self.task_state(gate) == "awaiting_input"

    def decide(self, gate: str, option: str) -> None:
        """What a person's answer to a required action does."""
        self.until(lambda: self.is_asked(gate))
        # An answer before Airflow's scheduler knows that the task waits can be lost, and the task asks again.
        told = f"TaskInstance Finished: dag_id={DAG_ID}, task_id={gate}, run_id={self.run_id}, "
        attempt = f"try_number={self.task(gate)['try_number']}, "
        scheduler_log = HOME / "logs" / "scheduler.log"
        self.until(lambda: any(told in line and attempt in line for line in scheduler_log.read_text().splitlines()))
        path = f"/dags/{DAG_ID}/dagRuns/{self.run_id}/taskInstances/{gate}/-1/hitlDetails"
        self.stack.api.call("PATCH", path, body={"chosen_options": [option], "params_input": {}})

    def fail(self) -> None:
        """What a person's "mark as failed" of the whole run does."""
        self.stack.api.call("PATCH", f"/dags/{DAG_ID}/dagRuns/{self.run_id}", body={"state": "failed"})

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something in the run; the run must not end before."""

        reached = False

        def reached_or_over() -> bool:
            nonlocal reached
            try:
                has_ended = self.has_ended  # asked first: what is reached as the run ends is reached
                reached = bool(condition())
                return reached or has_ended
            except Retryable:  # Airflow does not answer for a moment
                return False

        until(reached_or_over)
        assert reached, f"the run ended as {self.state} before: {self.states()}\n{self.last_words()}"

    def last_words(self) -> str:
        """How the logs of its failed tasks end: the stack is gone when somebody reads of the failure."""
        failed = [(name, task["try_number"]) for name, task in self.tasks().items() if task["state"] == "failed"]
        return "\n".join(f"{name}, try {number}: {self.log(name, number)[-3000:]}" for name, number in failed)

    def must_end_as(self, state: str) -> None:
        """Wait for the run's end."""
        self.until(lambda: self.has_ended)
        assert self.state == state, f"{self.states()}\n{self.last_words()}"

    def states(self) -> dict[str, str | None]:
        return {name: task["state"] for name, task in self.tasks().items()}

    def check_log_equals_ledger(self, dataset: str) -> None:
        """Each prompt is in one state, and the responses are those that the ledger says."""
        statement = "SELECT sample_id, state, completion_tokens FROM samples WHERE edition = %s AND dataset = %s"
        rows = self.stack.query(statement, self.edition, dataset)
        states = {sample_id: state for sample_id, state, _ in rows}
        assert len(states) == len(rows)
        log = HOME / "data" / "editions" / self.edition / "datasets" / dataset / "responses.jsonl"
        responses = [json.loads(line) for line in log.read_text().splitlines()]
        answered = {response["sample_id"]: len(response["output_ids"]) for response in responses}
        assert len(answered) == len(responses)
        assert answered == {sample_id: tokens for sample_id, state, tokens in rows if state in ("kept", "quarantined")}


@contextmanager
def signed_in(stack: Stack, browser: "Browser", path: str) -> Iterator["Page"]:
    """A page of the stack's Airflow, of a person who has just logged in."""
    with open_page(browser) as page:
        page.goto(f"{stack.airflow_url}{path}")
        page.locator("input[name=username]").fill("admin")
        page.locator("input[name=password]").fill(stack.password)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(f"{stack.airflow_url}{path}")
        yield page


def show_users_dags() -> None:
    """Have Airflow read the DAGs of a user beside Aerie's, in Airflow's own words."""
    of_ours = {"name": "dags-folder", "kwargs": {}}
    of_users = {"name": "users", "kwargs": {"path": str(Path(__file__).parent / "dags")}}
    classpath = "airflow.dag_processing.bundles.local.LocalDagBundle"
    bundles = json.dumps([{**bundle, "classpath": classpath} for bundle in (of_ours, of_users)])
    (HOME / "airflow").mkdir(exist_ok=True)
    (HOME / "airflow" / "airflow.cfg").write_text(f"[dag_processor]\ndag_bundle_config_list = {bundles}\n")


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    if HOME.exists():
        aerie("down", "--purge")
    HOME.mkdir(parents=True, exist_ok=True)
    if not (HOME / "envs").exists():
        (HOME / "envs").symlink_to(aerie_home() / "envs")
    show_users_dags()
    try:
        started = aerie("up")
        assert started.returncode == 0, started.stderr
        made = json.loads((HOME / "stack.json").read_text())
        url, password = f"http://127.0.0.1:{made['airflow_port']}", made["airflow_password"]
        database_url = f"postgresql://aerie:{made['postgres_password']}@127.0.0.1:{made['postgres_port']}/aerie"
        yield Stack(AirflowApi(url, password), database_url, url, password)
    finally:
        stopped = aerie("down", "--purge")
    assert stopped.returncode == 0, stopped.stderr
