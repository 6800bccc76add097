"""The card on Airflow's own first page: the last run in short."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from aerie.store.queries.alerts import list_alerts
from aerie.store.queries.ledger import count_editions
from aerie.store.queries.runs import list_runs
from aerie_dashboard.listing import run_line
from aerie_dashboard.opened_store import Store
from aerie_dashboard.rendering import render

router = APIRouter()

LATEST_ALERTS = 100


@router.get("/card")
def show_card(request: Request, store: Store) -> HTMLResponse:
    """The last run: state, kept tokens, alerts."""
    rows = list_runs(store, limit=1)
    run = run_line(rows[0], count_editions(store, edition=rows[0]["edition"])) if rows else None
    alerts = [one for one in list_alerts(store, limit=LATEST_ALERTS) if run and one["run_id"] == run.run_id]
    return render(request, "card.html", run=run, alerts=alerts)
