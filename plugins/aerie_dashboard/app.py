"""The dashboard's app: every route asks Airflow who is there, and every error has a page."""

from fastapi import FastAPI, Request, Response, status
from fastapi.responses import JSONResponse
from psycopg2.errors import UndefinedColumn, UndefinedTable
from starlette.exceptions import HTTPException
from starlette.middleware.base import RequestResponseEndpoint

from aerie.errors import BadInput, Retryable
from aerie_dashboard.pages import (
    alerts,
    card,
    corpus,
    dataset,
    drafter,
    overview,
    response_log,
    run,
    server,
    static,
    task,
)
from aerie_dashboard.rendering import render
from aerie_dashboard.security import CLOSED, HEADERS

PAGES = tuple(
    page.router for page in (overview, run, task, dataset, response_log, corpus, drafter, server, alerts, card, static)
)


def create_app() -> FastAPI:
    """The app, closed to strangers and without pages about itself."""
    app = FastAPI(title="Aerie", docs_url=None, redoc_url=None, openapi_url=None, dependencies=CLOSED)
    for router in PAGES:
        app.include_router(router)
    app.middleware("http")(_add_headers)
    app.exception_handler(HTTPException)(_refusal)
    app.exception_handler(Retryable)(_store_is_away)
    app.exception_handler(BadInput)(_store_is_away)
    app.exception_handler(UndefinedTable)(_store_is_old)
    app.exception_handler(UndefinedColumn)(_store_is_old)
    app.exception_handler(Exception)(_defect)
    return app


async def _add_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _refusal(request: Request, error: HTTPException) -> Response:
    """What was asked for is not there, or not for this user; programs get JSON."""
    if "text/html" not in request.headers.get("Accept", ""):
        return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)
    return _page(request, error.status_code, TITLES.get(error.status_code, "This did not work"), str(error.detail))


TITLES = {
    status.HTTP_401_UNAUTHORIZED: "Sign in to Airflow to see this page",
    status.HTTP_403_FORBIDDEN: "Your role does not allow this",
    status.HTTP_404_NOT_FOUND: "There is no such page",
}


def _store_is_away(request: Request, error: Exception) -> Response:
    return _page(request, status.HTTP_503_SERVICE_UNAVAILABLE, "The store cannot be read now", str(error))


def _store_is_old(request: Request, error: Exception) -> Response:
    missing = " ".join(str(error).split("\n")[0].split())
    detail = f"{missing}: the store is older than this dashboard; ./aerie up brings it up to date"
    return _page(request, status.HTTP_503_SERVICE_UNAVAILABLE, "The store is not up to date", detail)


def _defect(request: Request, error: Exception) -> Response:
    """A defect of the dashboard; its traceback is in the API server's log and never on a page."""
    detail = f"{type(error).__name__}; the API server's log has the rest"
    return _page(request, status.HTTP_500_INTERNAL_SERVER_ERROR, "The dashboard could not make this page", detail)


def _page(request: Request, code: int, title: str, detail: str) -> Response:
    response = render(request, "error.html", status_code=code, title=title, detail=detail, code=code)
    response.headers.update(HEADERS)
    return response


app = create_app()
