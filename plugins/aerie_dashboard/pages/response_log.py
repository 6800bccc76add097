"""The response log of a data set: the files that hold its rows, where they lie on this host."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from aerie.artefacts.response_log import log_files
from aerie.settings.machine import data_root
from aerie_dashboard.rendering import render
from aerie_dashboard.response_files import response_log_of

router = APIRouter()


@router.get("/editions/{edition}/datasets/{dataset}/responses")
def show_response_log(request: Request, edition: str, dataset: str) -> HTMLResponse:
    """Name, size and time of every file of the log; a sample's own page leads to its row."""
    log = response_log_of(edition, dataset)
    found = [(path.name, path.stat()) for path in log_files(log) if path.is_file()]
    return render(
        request,
        "response_log.html",
        edition=edition,
        dataset=dataset,
        folder=str(log.parent.relative_to(data_root().resolve())),
        files=[(name, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC)) for name, stat in found],
    )
