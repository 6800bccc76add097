"""The tab of a task: the page that shows what the task works on."""

from fastapi import APIRouter, HTTPException, Request, status
from fastapi.responses import RedirectResponse

from aerie.store.queries.benchmarks import list_benchmarks
from aerie.store.queries.runs import read_run
from aerie_dashboard.addresses import dataset_path, drafter_path, run_path
from aerie_dashboard.opened_store import Store

router = APIRouter()


@router.get("/tasks/{run_id:path}/{task_id}")
def show_task(request: Request, run_id: str, task_id: str, store: Store) -> RedirectResponse:
    """The data set of a task that works on one, servers for starts and stops, a benchmark's drafter, else the run."""
    row = read_run(store, run_id=run_id)
    if row is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"the store has no run {run_id}: it is none of Aerie's pipeline")
    dataset, _, _name = task_id.rpartition(".")
    path = run_path(run_id)
    if dataset:
        path = dataset_path(row["edition"], dataset)
    elif task_id.startswith(("start_server_", "stop_server_")):
        path = "/servers"
    elif task_id == "benchmark":
        measured = list_benchmarks(store, run_id=run_id, limit=1)
        path = drafter_path(measured[0]["drafter_id"]) if measured and measured[0]["drafter_id"] else path
    return RedirectResponse(request.scope["root_path"] + path, status.HTTP_307_TEMPORARY_REDIRECT)
