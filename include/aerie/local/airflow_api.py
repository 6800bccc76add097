"""Airflow's REST API, as far as the command line and the tests use it; an ``airflow`` command costs 10 s of imports."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

import requests

from aerie.errors import BadInput, Retryable

HEALTHY_COMPONENTS = ("metadatabase", "scheduler", "triggerer", "dag_processor")
REQUEST_SECONDS = 30
TERMINAL_RUN_STATES = ("success", "failed")


class AirflowApi:
    """A session of user ``admin``."""

    def __init__(self, url: str, password: str) -> None:
        self._url = url
        self._password = password
        self._session = requests.Session()

    def is_healthy(self) -> bool:
        """Whether all four components report healthy."""
        try:
            health = self._session.get(f"{self._url}/api/v2/monitor/health", timeout=REQUEST_SECONDS).json()
        except (requests.ConnectionError, requests.Timeout, requests.JSONDecodeError):
            return False
        return all(health.get(name, {}).get("status") == "healthy" for name in HEALTHY_COMPONENTS)

    def _log_in(self) -> None:
        answer = self._session.post(
            f"{self._url}/auth/token", json={"username": "admin", "password": self._password}, timeout=REQUEST_SECONDS
        )
        if not answer.ok:
            raise BadInput(
                f"{self._url}: Airflow refuses user admin ({answer.status_code}): ./aerie down, then ./aerie up"
            )
        self._session.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def call(self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] | None = None) -> Any:
        """Call the REST API and return its JSON answer, logging in first where needed.

        Raises:
            BadInput: Airflow refuses the request; the message is Airflow's.
            Retryable: Airflow does not answer.
        """
        for attempt in (1, 2):
            if "Authorization" not in self._session.headers or attempt == 2:
                self._log_in()
            try:
                answer = self._session.request(
                    method, f"{self._url}/api/v2{path}", json=body, params=query, timeout=REQUEST_SECONDS
                )
            except (requests.ConnectionError, requests.Timeout) as error:
                raise Retryable(f"{self._url}: Airflow does not answer: {error}") from error
            if answer.status_code != requests.codes.unauthorized:
                break
        if not answer.ok:
            raise BadInput(f"Airflow refuses {method} {path} ({answer.status_code}): {answer.text[:500]}")
        return answer.json() if answer.content else None

    def pool_slots(self) -> dict[str, int]:
        """Slots of each pool by its name; -1 is without limit."""
        pools = self.call("GET", "/pools", query={"limit": 100})["pools"]
        return {pool["name"]: pool["slots"] for pool in pools}

    def make_pool(self, name: str, slots: int, description: str) -> None:
        """Make a pool that is not there."""
        body = {"name": name, "slots": slots, "description": description, "include_deferred": False}
        self.call("POST", "/pools", body=body)

    def resize_pool(self, name: str, slots: int) -> None:
        """Give a pool other slots, and leave all else of it as it is."""
        self.call("PATCH", f"/pools/{quote(name, safe='')}", body={"slots": slots}, query={"update_mask": "slots"})

    def has_dag(self, dag_id: str) -> bool:
        """Whether the DAG was parsed, without import errors of its own."""
        return any(dag["dag_id"] == dag_id for dag in self.call("GET", "/dags", query={"limit": 100})["dags"])

    def import_errors(self) -> list[str]:
        """Import errors of DAG files, as text."""
        found = self.call("GET", "/importErrors")["import_errors"]
        return [f"{error['filename']}: {error['stack_trace']}" for error in found]

    def trigger(self, dag_id: str, conf: Mapping[str, Any], *, run_id: str | None = None) -> str:
        """Trigger a run and return its id."""
        body = {"logical_date": None, "conf": conf, **({"dag_run_id": run_id} if run_id else {})}
        created: str = self.call("POST", f"/dags/{dag_id}/dagRuns", body=body)["dag_run_id"]
        return created

    def run_url(self, dag_id: str, run_id: str) -> str:
        """Where a person sees the run."""
        return f"{self._url}/dags/{dag_id}/runs/{run_id}"

    def run(self, dag_id: str, run_id: str) -> Any:
        """One run."""
        return self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")

    def active_runs(self, dag_id: str) -> list[Any]:
        """Runs that are queued or running, the oldest first."""
        query = {"state": ["running", "queued"], "order_by": "run_after"}
        runs: list[Any] = self.call("GET", f"/dags/{dag_id}/dagRuns", query=query)["dag_runs"]
        return runs

    def tasks(self, dag_id: str, run_id: str) -> list[Any]:
        """Task instances of a run."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances"
        tasks: list[Any] = self.call("GET", path, query={"limit": 200})["task_instances"]
        return tasks

    def _log_lines(self, dag_id: str, run_id: str, task_id: str, attempt: int) -> list[Any]:
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{attempt}"
        lines: list[Any] = self.call("GET", path, query={"full_content": "true"})["content"]
        return lines

    def log(self, dag_id: str, run_id: str, task_id: str, attempt: int) -> list[str]:
        """Lines of a task's log; an exception's message is one line after the line that reports it."""
        content = self._log_lines(dag_id, run_id, task_id, attempt)
        return [text for line in content for text in (str(line["event"]), *_exceptions(line))]

    def error(self, dag_id: str, run_id: str, task_id: str, attempt: int) -> str:
        """What a failed task says went wrong: its exception's message, else its last line."""
        content = self._log_lines(dag_id, run_id, task_id, attempt)
        errors = [text for line in content for text in _exceptions(line)]
        lines = [str(line["event"]) for line in content if not str(line["event"]).startswith("::")]
        return [*lines, *errors][-1] if lines or errors else "it left no log"


def _exceptions(line: Mapping[str, Any]) -> list[str]:
    """Messages of the exceptions that a log line carries."""
    return [str(error["exc_value"]) for error in line.get("error_detail") or ()]


def seconds_between(started: str, ended: str) -> float:
    """Seconds between two of the API's times."""
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()
