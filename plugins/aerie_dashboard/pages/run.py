"""The page of a run, and the part of it that refreshes itself."""

from typing import Annotated, Any

from airflow.api_fastapi.common.db.common import SessionDep
from fastapi import APIRouter, HTTPException, Query, Request, status
from fastapi.responses import HTMLResponse

from aerie.store.queries.alerts import count_alerts, list_alerts
from aerie.store.queries.leases import list_leases
from aerie.store.queries.ledger import count_editions
from aerie.store.queries.manifests import latest_manifests
from aerie.store.queries.metrics import sample_metrics
from aerie.store.queries.plans import read_plan
from aerie.store.queries.runs import list_editions, read_run
from aerie_dashboard.airflow_tasks import tasks_of
from aerie_dashboard.corpus_report import corpus_report_of
from aerie_dashboard.documents import Unreadable
from aerie_dashboard.listing import run_line
from aerie_dashboard.opened_store import Store
from aerie_dashboard.rendering import render
from aerie_dashboard.run_view import dataset_progress, keys_of, server_now, stage_lines, tasks_beside, total_speed
from aerie_dashboard.server_view import launches_of_run, plan_of

router = APIRouter()

POINTS, LATEST_ALERTS, LATEST_LEASES = 60, 200, 100
REFRESH_SECONDS = 5


@router.get("/runs/{run_id:path}")
def show_run(
    request: Request, run_id: str, store: Store, session: SessionDep, part: Annotated[str | None, Query()] = None
) -> HTMLResponse:
    """One run; ``part=live`` answers with what changes while it runs."""
    row = read_run(store, run_id=run_id)
    if row is None:
        raise HTTPException(
            status.HTTP_404_NOT_FOUND, f"the store has no run {run_id}: it appears when its first task runs"
        )
    template = "run_live.html" if part == "live" else "run.html"
    return render(request, template, refresh_seconds=REFRESH_SECONDS, **_content(store, session, row))


def _content(store: Store, session: SessionDep, row: dict[str, Any]) -> dict[str, Any]:
    edition, run_id = row["edition"], row["run_id"]
    counts = count_editions(store, edition=edition)
    run = run_line(row, counts)
    tasks = tasks_of(session, run_id)
    manifests = latest_manifests(store, edition=edition)
    stops = {stop["dataset"]: stop for stop in list_editions(store) if stop["edition"] == edition}
    validated = {one["dataset"]: one for one in manifests if one["stage"] == "validate"}
    keys = () if isinstance(run.config, Unreadable) else keys_of(run.config.datasets)
    series = {key: _series(store, run_id, edition, key, row) for key in keys}
    progress = [
        dataset_progress(
            key,
            edition=edition,
            counts=counts.get((edition, key)),
            series=series[key],
            tasks=tasks,
            stop=stops.get(key),
            validated=validated.get(key),
            budget=run.budget_of(key),
        )
        for key in keys
    ]
    return {
        "run": run,
        "corpus_report": corpus_report_of(edition) is not None,
        "dag_id": row["dag_id"],
        "airflow_knows": bool(tasks),
        "stages": stage_lines(tasks, manifests, run_id),
        "beside": tasks_beside(tasks),
        "progress": progress,
        "speed": total_speed({key: rows for key, rows in series.items() if rows}),
        "server": server_now(progress),
        "launches": launches_of_run(list_leases(store, held_by=run_id, limit=LATEST_LEASES)),
        "plan": plan_of(read_plan(store, run_id=run_id), run_id),
        "alerts": list_alerts(store, run_id=run_id, limit=LATEST_ALERTS),
        "alert_count": count_alerts(store, run_id=run_id),
    }


def _series(store: Store, run_id: str, edition: str, key: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    began, ended = row["started_at"], row["finished_at"]
    rows = sample_metrics(
        store, edition=edition, stage="generate", dataset=key, points=POINTS, since=began, until=ended
    )
    return [one for one in rows if one["run_id"] == run_id]
