"""What people do about alerts."""

from urllib.parse import urlsplit

from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, HTTPException, Request, status
from fastapi.responses import RedirectResponse

from aerie.store.queries.alerts import acknowledge_alert
from aerie_dashboard.opened_store import Store
from aerie_dashboard.security import is_own

router = APIRouter()


@router.post("/alerts/{alert_id}/acknowledge")
def acknowledge(request: Request, store: Store, user: GetUserDep, alert_id: int) -> RedirectResponse:
    """Record that somebody has seen an alert, and go back to the page with the button."""
    if not acknowledge_alert(store, alert_id=alert_id, user=user.get_name()):
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"there is no alert {alert_id}")
    return RedirectResponse(_page_before(request), status.HTTP_303_SEE_OTHER)


def _page_before(request: Request) -> str:
    """The dashboard's page that the request came from, never one of another server; else the first page."""
    root = request.scope["root_path"]
    referer = request.headers.get("Referer", "")
    if is_own(request, referer) and urlsplit(referer).path.startswith(f"{root}/"):
        page = urlsplit(referer)
        return f"{page.path}?{page.query}" if page.query else page.path
    return f"{root}/"
