"""Servers: the memory plan, leases, what launches turned out to hold, and the tail of a server's log."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request, status
from fastapi.responses import HTMLResponse

from aerie.masking import masked
from aerie.settings.machine import server_folder
from aerie.store.queries.leases import list_leases, read_lease
from aerie.store.queries.observations import latest_observations
from aerie.store.queries.plans import latest_plan
from aerie_dashboard.documents import Unreadable, read_document
from aerie_dashboard.opened_store import Store
from aerie_dashboard.rendering import render
from aerie_dashboard.security import requires_logs
from aerie_dashboard.server_view import Launched, launched_memory, launches_chart, lease_lines, plan_of

router = APIRouter()

LATEST = 30
TAIL_BYTES = 256 * 1024
LINES = 400


@router.get("/servers")
def show_servers(request: Request, store: Store) -> HTMLResponse:
    """The latest plan, leases and launches."""
    plan = latest_plan(store)
    read = [
        read_document(Launched, row["document"], place=f"observations, launch_token {row['launch_token']}")
        for row in latest_observations(store, limit=LATEST)
    ]
    launches = [one for one in read if isinstance(one, Launched)]
    return render(
        request,
        "servers.html",
        plan=plan_of(plan, plan["run_id"]) if plan else None,
        leases=lease_lines(list_leases(store, limit=LATEST)),
        launches=launches,
        problems=[one for one in read if isinstance(one, Unreadable)],
        tokens=launches_chart(launches),
        memory=launched_memory(launches),
    )


@router.get("/servers/{launch_token}/log", dependencies=[Depends(requires_logs)])
def show_log(
    request: Request, launch_token: str, store: Store, lines: Annotated[int, Query(ge=1, le=5000)] = LINES
) -> HTMLResponse:
    """The end of a server's log, where it lies on this host."""
    row = read_lease(store, launch_token=launch_token)
    if row is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"the store has no server {launch_token}")
    path = _confined(row["document"].get("log_path"))
    return render(
        request,
        "server_log.html",
        launch_token=launch_token,
        host=row["document"].get("host"),
        name=path.name if path else None,
        tail=_tail(path, lines) if path else None,
        lines=lines,
    )


def _confined(given: object) -> Path | None:
    """A log inside the server's folder, None where it is not there: another host has it, or it was removed.

    Raises:
        HTTPException: the lease names a file that is none of the server's logs.
    """
    folder = server_folder().resolve()
    path = Path(str(given)).resolve()
    if not isinstance(given, str) or path.suffix != ".log":
        raise HTTPException(status.HTTP_404_NOT_FOUND, "the lease of this server names no log")
    if path.is_relative_to(folder):
        return path if path.is_file() else None
    if path.exists():
        raise HTTPException(status.HTTP_403_FORBIDDEN, f"the log of this server is outside {folder.name}/")
    return None


def _tail(path: Path, lines: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return masked("\n".join(file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-lines:]))
