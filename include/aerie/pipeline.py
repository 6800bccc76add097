"""The pipeline's order, and what a run's parameters ask of it."""

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from aerie.settings.machine import data_root, server_folder
from aerie.settings.pipeline import DATASET_KEYS, PipelineSettings
from aerie.settings.profile import Frozen
from aerie.stages import StageRequest

Step = Literal[
    "prepare", "generate", "validate",
    "merge", "vocabulary", "forecast", "capture", "train", "export", "benchmark", "publish",
]  # fmt: skip
STEPS: tuple[str, ...] = get_args(Step)
"""Stages in the order in which data flows; ``import`` is the ``prepare`` of data sets that are already tokenised."""

Place = Literal["before", "inside", "outside"]

DEFAULT_EDITION = "main"
EDITION_PATTERN = r"^[a-z0-9_-]+$"


class RunParameters(Frozen):
    """What a person asks of one run. ``budget_tokens`` None takes each data set's own."""

    datasets: tuple[str, ...] = DATASET_KEYS
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    edition: str = DEFAULT_EDITION
    first: Step = Field(default="prepare", alias="from")
    last: Step = Field(default="publish", alias="to")
    force: bool = False

    @field_validator("edition")
    @classmethod
    def _label(cls, edition: str) -> str:
        if not re.fullmatch(EDITION_PATTERN, edition):
            raise ValueError(f"edition {edition!r}: expected lower-case letters, digits, '_' and '-'")
        return edition

    def describe(self) -> str:
        """One line for a log."""
        budget = "the configured budgets" if self.budget_tokens is None else f"{self.budget_tokens:,} tokens a data set"
        return f"data sets {', '.join(self.datasets)}; {budget}; from {self.first} to {self.last}"


def step_of(stage: str, phase: str | None) -> str:
    """The step that a stage belongs to; a server's start and stop belong to what the server is for."""
    if stage == "import":
        return "prepare"
    if phase is not None:
        return phase
    return stage


def place_of(parameters: RunParameters, *, stage: str, dataset: str | None, phase: str | None) -> Place:
    """Where a task stands in a run.

    ``before`` its first step, ``inside``, or ``outside``: after its last step, or of a data set that is not selected.
    """
    if dataset is not None and dataset not in parameters.datasets:
        return "outside"
    step = step_of(stage, phase)
    if step not in STEPS:
        return "inside"
    if STEPS.index(step) < STEPS.index(parameters.first):
        return "before"
    return "inside" if STEPS.index(step) <= STEPS.index(parameters.last) else "outside"


def stage_request(
    settings: PipelineSettings,
    parameters: RunParameters,
    *,
    run_id: str,
    dataset: str | None = None,
    phase: str | None = None,
) -> StageRequest:
    """The request of one task of a run."""
    if parameters.budget_tokens is not None:
        settings = settings.with_budget(parameters.budget_tokens)
    document = {
        "data_root": data_root(),
        "server_folder": server_folder(),
        "edition": parameters.edition,
        "dataset": dataset,
        "selected": parameters.datasets,
        "phase": phase,
        "run_id": run_id,
        "force": parameters.force,
    }
    return StageRequest.model_validate({"settings": settings, **document})
