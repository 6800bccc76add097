"""Who may see and do what: Airflow's own users, roles and sessions. Nothing of the dashboard is open to strangers.

A plugin's FastAPI app is open to anyone unless its routes ask; these dependencies are the whole app's, so that no
page can be added without them.
"""

from urllib.parse import urlsplit

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag, requires_access_view
from airflow.configuration import conf
from fastapi import Depends, HTTPException, Request, status

DAG_ID = "eagle3_pipeline"
READING = ("GET", "HEAD")

_may_read = requires_access_dag("GET", DagAccessEntity.RUN, param_dag_id=DAG_ID)
_may_read_tasks = requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE, param_dag_id=DAG_ID)
_may_act = requires_access_dag("PUT", DagAccessEntity.RUN, param_dag_id=DAG_ID)
_may_read_logs = requires_access_dag("GET", DagAccessEntity.TASK_LOGS, param_dag_id=DAG_ID)


def requires_role(request: Request, user: GetUserDep) -> None:
    """Viewers of the pipeline see; whoever may change its runs acts. 401 for strangers, 403 for the wrong role.

    Pages learn from ``request.state.may_act`` whether to offer what only some may do.
    """
    if request.method in READING:
        _may_read(request, user)
        _may_read_tasks(request, user)
        request.state.may_act = _is_allowed_to_act(request, user)
    else:
        _may_act(request, user)


def _is_allowed_to_act(request: Request, user: GetUserDep) -> bool:
    try:
        _may_act(request, user)
    except HTTPException as refusal:
        if refusal.status_code != status.HTTP_403_FORBIDDEN:
            raise
        return False
    return True


def requires_logs(request: Request, user: GetUserDep) -> None:
    """Whoever may read the logs of the pipeline's tasks may read its server's."""
    _may_read_logs(request, user)


def requires_own_origin(request: Request) -> None:
    """What changes something comes from a page of this server, not from one that borrows the user's cookie.

    A request with a bearer token borrows nothing.
    """
    if request.method in READING or request.headers.get("Authorization", "").lower().startswith("bearer "):
        return
    origin = request.headers.get("Origin")
    if origin is None or not is_own(request, origin):
        raise HTTPException(
            status.HTTP_403_FORBIDDEN,
            f"this request comes from {origin or 'a page that is not named'}, not from a page of this server; behind a "
            "proxy, Airflow's [api] base_url has to be the address that people type",
        )


def is_own(request: Request, url: str) -> bool:
    """Whether an address is on this server: as the request names it, or as people do, whose proxy may rename it."""
    public: str = conf.get("api", "base_url", fallback="") or ""
    try:
        if urlsplit(url).netloc == request.headers.get("Host"):
            return True
        # An address without a host, such as "null", is nobody's, whatever is configured.
        return bool(urlsplit(url).hostname) and _origin(url) == _origin(public)
    except ValueError:  # no address at all
        return False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port, as browsers compare them."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def requires_text(request: Request) -> None:
    """No name holds a null character, and PostgreSQL takes no text with one."""
    if any("\0" in value for value in (*request.path_params.values(), *request.query_params.values())):
        raise HTTPException(status.HTTP_404_NOT_FOUND, "no name holds a null character")


CLOSED = [
    Depends(requires_access_view(AccessView.WEBSITE)),
    Depends(requires_role),
    Depends(requires_own_origin),
    Depends(requires_text),
]
"""Dependencies of every route."""

HEADERS = {
    # Nothing inline and nothing from elsewhere: a stored text that got through as markup could still do nothing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""
