"""The response log of a data set: the files that hold its rows, where they lie on this host."""

from datetime import UTC, datetime

from fastapi import APIRouter, HTTPException, Request, status
from fastapi.responses import HTMLResponse

from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.response_log import log_files
from aerie.settings.machine import data_root
from aerie_dashboard.rendering import render

router = APIRouter()


@router.get("/editions/{edition}/datasets/{dataset}/responses")
def show_response_log(request: Request, edition: str, dataset: str) -> HTMLResponse:
    """Name, size and time of every file of the log; a sample's own page leads to its row."""
    root = data_root().resolve()
    log = EditionFiles(root, edition).dataset(dataset).responses
    if not log.resolve().is_relative_to(root):
        raise HTTPException(status.HTTP_404_NOT_FOUND, "this data set is not below the data root")
    found = [(path.name, path.stat()) for path in log_files(log) if path.is_file()]
    return render(
        request,
        "response_log.html",
        edition=edition,
        dataset=dataset,
        folder=str(log.parent.relative_to(root)),
        files=[(name, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC)) for name, stat in found],
    )
