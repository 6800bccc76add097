"""States and times of a run's tasks, as Airflow has them; the app asks for the right to see them on every route."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from airflow.api_fastapi.common.db.common import SessionDep
from airflow.models.taskinstance import TaskInstance
from sqlalchemy import select

from aerie_dashboard.security import DAG_ID

ENDED_WELL = ("success", "skipped", "removed")


@dataclass(frozen=True)
class Task:
    """One task of a run; ``state`` None has not been reached."""

    task_id: str
    state: str | None
    began: datetime | None
    ended: datetime | None


def tasks_of(session: SessionDep, run_id: str) -> list[Task]:
    """The tasks of a run, none where Airflow no longer has it."""
    wanted = (TaskInstance.task_id, TaskInstance.state, TaskInstance.start_date, TaskInstance.end_date)
    rows = session.execute(
        select(*wanted).where(TaskInstance.dag_id == DAG_ID, TaskInstance.run_id == run_id).order_by(*wanted[:1])
    )
    return [Task(task_id, str(state) if state else None, began, ended) for task_id, state, began, ended in rows]


def joint_state(tasks: Sequence[Task]) -> str:
    """The state of several tasks as one: what needs a person first, then what goes on, then what is over."""
    states = [task.state for task in tasks]
    if any(state in ("failed", "upstream_failed") for state in states):
        return "failed"
    open_states = [state for state in states if state not in (*ENDED_WELL, None)]
    if "running" in open_states:
        return "running"
    if open_states:
        return str(open_states[0])
    if all(state == "skipped" for state in states) and states:
        return "skipped"
    if None in states or not states:
        return "running" if any(state == "success" for state in states) else "waiting"
    return "success"


def seconds_of(tasks: Sequence[Task]) -> float | None:
    """From the first beginning to the last end, or until now; None where nothing has begun."""
    begun = [task for task in tasks if task.began is not None and task.state != "skipped"]
    if not begun:
        return None
    first = min(task.began for task in begun if task.began)
    last = max(task.ended or datetime.now(UTC) for task in begun)
    return (last - first).total_seconds()
