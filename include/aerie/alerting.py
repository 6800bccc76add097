"""What a person is told of when something needs them: the alert, and its words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from aerie.masking import masked
from aerie.settings.profile import Frozen

TASK_FAILED = "task_failed"
RUN_FAILED = "run_failed"
DEADLINE_MISSED = "deadline_missed"
DEADLINE_AT_RISK = "deadline_at_risk"
BUDGET_REACHED = "budget_reached"
TEST = "test"

INFORMATION = frozenset({BUDGET_REACHED, TEST})
"""Reasons that nobody has to act on."""

FAILURES = frozenset({TASK_FAILED, RUN_FAILED, DEADLINE_MISSED})

LONGEST_LINE = 600
MOST_NAMED = 3
WITHOUT_A_WORD = "it was ended from outside: marked failed by a person, or its worker died or lost touch with Airflow"


class Alert(Frozen):
    """One thing to tell. ``message`` is the first useful line; ``log_url`` opens the log that has the rest."""

    reason: str
    message: Annotated[str, AfterValidator(masked)]
    run_id: str | None = None
    edition: str | None = None
    dataset: str | None = None
    stage: str | None = None
    task_id: str | None = None
    try_number: int | None = None
    log_url: str | None = None

    @property
    def kind(self) -> Literal["info", "warning", "failure"]:
        """How bad it is, in Apprise's words."""
        if self.reason in INFORMATION:
            return "info"
        return "failure" if self.reason in FAILURES else "warning"

    @property
    def title(self) -> str:
        """One short line: what happened, and to what."""
        about = self.dataset or self.stage or self.task_id or self.edition
        return f"Aerie: {self.reason.replace('_', ' ')}" + (f" ({about})" if about else "")

    @property
    def body(self) -> str:
        """The message's text: one fact a line, those that are not known left out."""
        task = None if self.task_id is None else self.task_id + (f", try {self.try_number}" if self.try_number else "")
        facts = {
            "Data set": self.dataset,
            "Edition": self.edition,
            "Reason": self.reason,
            "Task": task,
            "Run": self.run_id,
            "Log": self.log_url,
        }
        return "\n".join([self.message, "", *(f"{name}: {value}" for name, value in facts.items() if value)])


def first_useful_line(error: BaseException | str) -> str:
    """The line of an error that says what is wrong.

    Aerie's own errors say it in their message; of any other class, the class is a part of it. Of a traceback that
    arrives as text it is the last line.
    """
    from aerie.errors import AerieError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, AerieError):
        line = lines[0] if lines else type(error).__name__
    elif isinstance(error, BaseException):
        line = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    elif lines and lines[0].startswith("Traceback "):
        line = lines[-1]
    else:
        line = lines[0] if lines else "no message"
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


@dataclass(frozen=True)
class FailedTask:
    """A task that failed, and the first useful line of why."""

    task_id: str
    message: str = WITHOUT_A_WORD


def run_failure(failed: Sequence[FailedTask], *, not_run: int, reason: str) -> str:
    """What a failed run tells: the first cause, and how much was not run.

    ``reason`` is Airflow's, for a run that failed without a failed task.
    """
    if not failed:
        return f"the run failed without a failed task: {reason.replace('_', ' ')}"
    first, *others = failed
    also = [one.task_id for one in others[:MOST_NAMED]]
    if len(others) > MOST_NAMED:
        also.append(f"{len(others) - MOST_NAMED:,} more")
    facts = [f"{first.task_id} failed: {first.message}"]
    if also:
        facts.append(f"so did {', '.join(also)}")
    if not_run:
        facts.append(f"{not_run:,} tasks were not run because of that")
    return "; ".join(facts)
