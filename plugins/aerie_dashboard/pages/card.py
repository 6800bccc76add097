"""The card on Airflow's own first page: the last run in short."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from aerie.store.queries.alerts import count_alerts
from aerie.store.queries.ledger import count_editions
from aerie.store.queries.runs import list_runs
from aerie_dashboard.listing import run_line
from aerie_dashboard.opened_store import Store
from aerie_dashboard.rendering import render

router = APIRouter()


@router.get("/card")
def show_card(request: Request, store: Store) -> HTMLResponse:
    """The last run: state, kept tokens, alerts."""
    rows = list_runs(store, limit=1)
    run = run_line(rows[0], count_editions(store, edition=rows[0]["edition"])) if rows else None
    alert_count = count_alerts(store, run_id=run.run_id) if run else 0
    return render(request, "card.html", run=run, alert_count=alert_count)
