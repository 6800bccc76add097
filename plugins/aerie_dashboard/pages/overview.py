"""The first page: runs, editions, the latest alerts."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from aerie.store.queries.alerts import list_alerts
from aerie.store.queries.ledger import count_editions
from aerie.store.queries.runs import list_editions, list_runs
from aerie_dashboard.corpus_report import corpus_report_of
from aerie_dashboard.listing import editions_of, run_line
from aerie_dashboard.opened_store import Store
from aerie_dashboard.rendering import render

router = APIRouter()

LATEST_RUNS, LATEST_ALERTS = 25, 8


@router.get("/")
def show_overview(request: Request, store: Store) -> HTMLResponse:
    """Runs, editions and alerts, the latest first."""
    counts = count_editions(store)
    runs = [run_line(row, counts) for row in list_runs(store, limit=LATEST_RUNS)]
    editions = editions_of(list_editions(store), counts, runs)
    return render(
        request,
        "overview.html",
        runs=runs,
        editions=editions,
        reported={one.name for one in editions if corpus_report_of(one.name)},
        alerts=list_alerts(store, limit=LATEST_ALERTS),
    )
