"""What the page of a run shows, from rows of the store and the states of its tasks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aerie.pipeline import STEPS
from aerie.settings.pipeline import is_tokenised, keys_in_order
from aerie.store.queries.ledger import LedgerCounts
from aerie.store.queries.rows import Row
from aerie_dashboard.airflow_tasks import ENDED_WELL, Task, joint_state, seconds_of
from aerie_dashboard.charts import Chart, sparkline
from aerie_dashboard.documents import Stored, Unreadable, read_document
from aerie_dashboard.formatting import clock

STAGES = ("plan", *STEPS)
PER_DATASET = ("prepare", "generate", "validate")


class Figures(Stored):
    """One row of the time series of ``generate``.

    The server's figures are None while nobody could read them; the closing row of a data set comes without.
    """

    response_tokens: int
    budget_tokens: int | None
    done: int
    prompts: int
    in_flight: int
    mean_completion_tokens: float | None
    tokens_per_second: float
    eta_low_seconds: float | None
    eta_high_seconds: float | None
    server_token_usage: float | None = None
    server_running: float | None = None
    server_queued: float | None = None
    server_tokens_per_second: float | None = None
    gpu_utilisation: float | None = None


class ReasoningCounts(Stored):
    """What ``validate`` counted, as far as the page shows it."""

    reasoning_share: float | None


@dataclass(frozen=True)
class StageLine:
    """One stage of the pipeline in this run; ``done`` of ``total`` tasks are over."""

    name: str
    state: str
    seconds: float | None
    done: int
    total: int
    task_id: str | None


@dataclass(frozen=True)
class Part:
    """One part of a budget bar: name, amount, colour, and how it is written."""

    name: str
    amount: float
    colour: str
    text: str


@dataclass(frozen=True)
class DatasetProgress:
    """One data set of the run. ``unit`` is what its bar counts: tokens of a budget, or prompts where there is none."""

    key: str
    imported: bool
    stage: str | None
    state: str
    counts: LedgerCounts | None
    unit: str
    whole: float
    goal: float | None
    parts: tuple[Part, ...]
    figures: Figures | Unreadable | None
    at: datetime | None
    speed: Chart | None
    stopped_by: str | None
    stop_message: str | None
    reasoning_share: float | None
    problems: tuple[Unreadable, ...]

    @property
    def is_generating(self) -> bool:
        """Whether its rate and its end are those of now."""
        return self.stage == "generate" and self.state == "running"


def stage_lines(tasks: Sequence[Task], manifests: Iterable[Row], run_id: str) -> list[StageLine]:
    """The pipeline's stages; from the manifests of the run where Airflow no longer knows its tasks."""
    if not tasks:
        done = {row["stage"].replace("import", "prepare") for row in manifests if row["run_id"] == run_id}
        return [StageLine(name, "success" if name in done else "not known", None, 0, 0, None) for name in STAGES]
    return [_stage_line(name, [task for task in tasks if _stage_of(task.task_id) == name]) for name in STAGES]


def _stage_line(name: str, tasks: Sequence[Task]) -> StageLine:
    counted = [task for task in tasks if task.state != "skipped"]
    over = [task for task in counted if task.state in ENDED_WELL]
    shown = next((task for task in tasks if task.state == "failed"), tasks[0] if len(tasks) == 1 else None)
    return StageLine(
        name,
        joint_state(counted or tasks),
        seconds_of(tasks),
        len(over),
        len(counted),
        shown.task_id if shown else None,
    )


def _stage_of(task_id: str) -> str:
    name = task_id.rpartition(".")[2]
    return "prepare" if name == "import" else name


def tasks_beside(tasks: Iterable[Task]) -> list[Task]:
    """Tasks that are no stage, as far as they need a look: servers that start or failed, people who are asked."""
    settled = (*ENDED_WELL, "upstream_failed", None)
    return [task for task in tasks if _stage_of(task.task_id) not in STAGES and task.state not in settled]


def dataset_progress(
    key: str,
    *,
    edition: str,
    counts: LedgerCounts | None,
    series: Sequence[Row],
    tasks: Sequence[Task],
    stop: Row | None,
    validated: Row | None,
    budget: int | None,
) -> DatasetProgress:
    """One data set of a run.

    ``series`` are rows of its time series in this run, oldest first; ``budget`` is what the run's summary says, for a
    run that had nothing to generate.
    """
    latest = _latest_figures(key, edition, series)
    reasoning = _reasoning(key, edition, validated)
    known = latest if isinstance(latest, Figures) else None
    unit, whole, goal, parts = _bar(counts, known, budget)
    stage, state = _where(key, tasks)
    return DatasetProgress(
        key=key,
        imported=is_tokenised(key),
        stage=stage,
        state=state,
        counts=counts,
        unit=unit,
        whole=whole,
        goal=goal,
        parts=parts,
        figures=latest,
        at=series[-1]["at"] if series else None,
        speed=_speed(key, series),
        stopped_by="imported" if is_tokenised(key) and counts else stop["stopped_by"] if stop else None,
        stop_message=stop["stop_message"] if stop else None,
        reasoning_share=reasoning.reasoning_share if isinstance(reasoning, ReasoningCounts) else None,
        problems=tuple(one for one in (latest, reasoning) if isinstance(one, Unreadable)),
    )


def _latest_figures(key: str, edition: str, series: Sequence[Row]) -> Figures | Unreadable | None:
    if not series:
        return None
    place = f"interval_metrics, edition {edition}, dataset {key}, at {series[-1]['at'].isoformat()}"
    return read_document(Figures, series[-1]["figures"], place=place)


def _reasoning(key: str, edition: str, validated: Row | None) -> ReasoningCounts | Unreadable | None:
    if validated is None:
        return None
    place = f"manifests, edition {edition}, dataset {key}, stage validate"
    return read_document(ReasoningCounts, validated["document"]["counts"], place=place)


def _bar(
    counts: LedgerCounts | None, figures: Figures | None, budget: int | None
) -> tuple[str, float, float | None, tuple[Part, ...]]:
    """What the bar counts, its whole, the budget if there is one, and its parts."""
    if counts is None:
        return "tokens", 0, None, ()
    budget = figures.budget_tokens if figures else budget
    if not budget:
        numbers = (("kept", counts.kept, "teal"), ("in flight", counts.in_flight, "blue"))
        more = (("quarantined", counts.quarantined, "red"), ("failed", counts.failed, "amber"))
        parts = tuple(Part(name, amount, colour, f"{amount:,} prompts") for name, amount, colour in (*numbers, *more))
        return "prompts", counts.prompts - counts.skipped, None, parts
    quarantined = counts.judged_tokens - counts.kept_response_tokens
    expected = figures.in_flight * (figures.mean_completion_tokens or 0) if figures else 0
    parts = (
        Part("kept", counts.kept_response_tokens, "teal", f"{counts.kept_response_tokens:,} tokens"),
        Part("in flight", expected, "blue", f"about {expected:,.0f} tokens"),
        Part("quarantined", quarantined, "red", f"{quarantined:,} tokens"),
    )
    return "tokens", max(budget, sum(part.amount for part in parts)), budget, parts


def _where(key: str, tasks: Sequence[Task]) -> tuple[str | None, str]:
    """The stage that a data set has come to, and its state there."""
    mine = {_stage_of(task.task_id): task for task in tasks if task.task_id.startswith(f"{key}.")}
    reached: tuple[str | None, str] = (None, "waiting")
    for name in PER_DATASET:
        task = mine.get(name)
        if task is not None and task.state not in (None, "skipped", "upstream_failed"):
            reached = (name, task.state or "waiting")
    return reached


def _speed(key: str, series: Sequence[Row]) -> Chart | None:
    values = [row["figures"].get("tokens_per_second") for row in series]
    if len([value for value in values if value is not None]) < 2:
        return None
    return sparkline(f"{key}: tokens per second", values, [clock(row["at"]) for row in series])


def keys_of(datasets: Iterable[str]) -> tuple[str, ...]:
    """Data sets in the pipeline's order."""
    return keys_in_order(datasets)


@dataclass(frozen=True)
class ServerNow:
    """What the server reports while a data set is generated; None is not known."""

    dataset: str
    at: datetime
    figures: Figures


def server_now(progress: Iterable[DatasetProgress]) -> ServerNow | None:
    """The latest figures of the server among all data sets."""
    found = [
        ServerNow(one.key, one.at, one.figures)
        for one in progress
        if one.at and isinstance(one.figures, Figures) and one.figures.server_running is not None
    ]
    return max(found, key=lambda one: one.at, default=None)


def total_speed(series: Mapping[str, Sequence[Row]]) -> Chart:
    """Tokens per second of every data set over the run's time, one line each."""
    moments: list[datetime] = sorted({row["at"] for rows in series.values() for row in rows})
    lines: dict[str, dict[datetime, Any]] = {
        key: {row["at"]: row["figures"].get("tokens_per_second") for row in rows} for key, rows in series.items()
    }
    return Chart.model_validate(
        {
            "kind": "line",
            "title": "Tokens per second by data set",
            "labels": [clock(moment) for moment in moments],
            "series": [
                {"name": key, "values": [line.get(moment) for moment in moments]} for key, line in lines.items() if line
            ],
            "x_title": "time of day, UTC",
            "y_title": "tokens/s",
        }
    )
