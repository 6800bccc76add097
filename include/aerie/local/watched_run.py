"""One run of the pipeline, watched from a terminal."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from aerie.artefacts.files import write_text
from aerie.errors import BadInput, Failed, Retryable
from aerie.local import stack
from aerie.local.airflow_api import TERMINAL_RUN_STATES, AirflowApi, seconds_between
from aerie.local.configuration import StackConfiguration
from aerie.pipeline import DEFAULT_EDITION, run_parameters
from aerie.settings.machine import run_folder
from aerie.store.connection import connected
from aerie.store.queries.ledger import LedgerCounts, count_editions
from aerie.store.queries.runs import read_run
from aerie.summary import in_order, tables

DAG_ID = "eagle3_pipeline"
POLL_SECONDS = 3.0
TOLD_STATES = ("running", "awaiting_input", "failed", "up_for_retry", "success")
DAG_SECONDS = 120
EditionCounts = Mapping[tuple[str, str], LedgerCounts]
Report = Callable[[str], None]


def run_pipeline(
    report: Report, parameters: Mapping[str, Any], *, once: bool, summary_path: Path | None, preset: str | None = None
) -> bool:
    """Run the pipeline with these parameters of its form and print the summary; True when the run succeeded.

    A run with the same parameters that an interrupted command left going is watched to its end instead of starting a
    second one.
    """
    started = time.monotonic()
    stack.agreed_settings(preset)  # a refusal stops nothing: what runs is someone's
    try:
        configuration = stack.up(report, preset=preset)
        summary = _run(configuration, report, started, parameters)
        path = summary_path or run_folder(summary["run_id"]) / "summary.json"
        write_text(path, json.dumps({key: value for key, value in summary.items() if key != "run_id"}, indent=2) + "\n")
        console = Console(width=None if Console().is_terminal else 140)
        for part in tables(summary):
            console.print(part, highlight=False)
        report(f"run {summary['run_id']}: {summary['state']} in {summary['dag_run_seconds']:.0f} s; summary in {path}")
    finally:
        if once:
            stack.down(report, purge=False)
    if not once:
        console.print(
            f"Airflow: {configuration.airflow_url}  user admin  password {configuration.airflow_password}\n"
            "It stays up until ./aerie down", highlight=False,
        )  # fmt: skip
    return bool(summary["state"] == "success")


def _run(
    configuration: StackConfiguration, report: Report, started: float, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    api = AirflowApi(configuration.airflow_url, configuration.airflow_password)
    wait_for_dag(api, DAG_ID)
    run = None
    asked = run_parameters(parameters, backfill=False)
    for active in api.active_runs(DAG_ID):
        report(f"watching run {active['dag_run_id']}, which an earlier command started")
        ended = watch(api, configuration.database_url, active["dag_run_id"], report)
        same = run_parameters(ended["conf"] or {}, backfill=ended["run_type"] == "backfill") == asked
        run = ended if same else None
    if run is None or run["state"] != "success":
        run = watch(api, configuration.database_url, api.trigger(DAG_ID, parameters), report)
    run_id = run["dag_run_id"]
    with connected(configuration.database_url, application="aerie demo") as connection:
        recorded = read_run(connection, run_id=run_id)
    if recorded is None or not recorded["summary"]:
        raise Failed(f"run {run_id} ended as {run['state']} and left no summary: see its tasks' logs in Airflow")
    return {
        "run_id": run_id,
        "state": run["state"],
        "seconds": round(time.monotonic() - started, 1),
        "dag_run_seconds": round(seconds_between(run["start_date"], run["end_date"]), 1),
        **in_order(recorded["summary"]),
    }


def wait_for_dag(api: AirflowApi, dag_id: str) -> None:
    """Wait until Airflow has parsed the DAG.

    Raises:
        BadInput: its file has an import error.
        Failed: it does not appear.
    """
    deadline = time.monotonic() + DAG_SECONDS
    while not api.has_dag(dag_id):
        if errors := api.import_errors():
            raise BadInput(f"Airflow cannot import the DAG: {errors[0]}")
        if time.monotonic() > deadline:
            raise Failed(f"Airflow has not parsed {dag_id} after {DAG_SECONDS} s: see the dag-processor's log")
        time.sleep(1)


def watch(api: AirflowApi, database_url: str, run_id: str, report: Report) -> Any:
    """Report what changes in a run until it ends; return the run."""
    report(f"run {run_id}: {api.run_url(DAG_ID, run_id)}")
    seen: dict[str, str] = {}
    while True:
        run, tasks, counts = _look(api, database_url, run_id)
        _report_changes(tasks, seen, report)
        _report_generation(counts, tasks, report, seen)
        if run["state"] in TERMINAL_RUN_STATES:
            _report_failures(api, run_id, tasks, report)
            return run
        time.sleep(POLL_SECONDS)


@retry(
    retry=retry_if_exception_type(Retryable), stop=stop_after_attempt(20), wait=wait_fixed(POLL_SECONDS), reraise=True
)
def _look(api: AirflowApi, database_url: str, run_id: str) -> tuple[Any, list[Any], EditionCounts]:
    """The run, its tasks and the ledger of its edition; a component that restarts meanwhile is waited for."""
    run = api.run(DAG_ID, run_id)
    with connected(database_url, application="aerie demo") as connection:
        counts = count_editions(connection, edition=(run["conf"] or {}).get("edition", DEFAULT_EDITION))
    return run, api.tasks(DAG_ID, run_id), counts


def _report_changes(tasks: list[Any], seen: dict[str, str], report: Report) -> None:
    done = Counter(task["state"] or "waiting" for task in tasks)
    for task in tasks:
        state = task["state"]
        if state in TOLD_STATES and seen.get(task["task_id"]) != state:
            seen[task["task_id"]] = state
            duration = f" in {task['duration']:.0f} s" if task["duration"] and state != "running" else ""
            report(f"[{done['success']:2}/{len(tasks)}] {task['task_id']}: {state}{duration}")


def _report_generation(counts: EditionCounts, tasks: list[Any], report: Report, seen: dict[str, str]) -> None:
    running = {task["task_id"].partition(".")[0] for task in tasks if task["state"] == "running"}
    for (_, dataset), row in counts.items():
        line = f"{row.kept:,} kept, {row.quarantined:,} quarantined, {row.kept_response_tokens:,} response tokens"
        if dataset in running and row.kept and seen.get(f"progress of {dataset}") != line:
            seen[f"progress of {dataset}"] = line
            report(f"        {dataset}: {line}")


def _report_failures(api: AirflowApi, run_id: str, tasks: list[Any], report: Report) -> None:
    for task in tasks:
        if task["state"] == "failed":
            report(f"{task['task_id']} failed: {api.error(DAG_ID, run_id, task['task_id'], task['try_number'])}")
