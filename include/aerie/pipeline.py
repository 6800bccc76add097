"""The pipeline's order, and what a run's parameters ask of it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from aerie.artefacts.layout import EditionName
from aerie.errors import BadInput, one_line
from aerie.masking import masked
from aerie.placement import keeper_of
from aerie.settings.machine import data_root, server_folder
from aerie.settings.pipeline import DATASET_KEYS, PipelineSettings, is_tokenised
from aerie.settings.profile import Frozen
from aerie.stages import StageRequest

Step = Literal[
    "prepare", "generate", "validate",
    "merge", "vocabulary", "forecast", "capture", "train", "export", "benchmark", "publish",
]  # fmt: skip
STEPS: tuple[str, ...] = get_args(Step)
"""Stages in the order in which data flows; ``import`` is the ``prepare`` of data sets that are already tokenised."""

Place = Literal["before", "inside", "outside"]

PILOT_END: Step = "benchmark"
LAST_STEP: Step = "publish"
BACKFILL_END: Step = "validate"
"""Last step of a backfill that does not say otherwise: it mends one data set's data, not the drafter."""

DEFAULT_EDITION = "main"


class RunParameters(Frozen):
    """What a person asks of one run. ``budget_tokens`` None takes each data set's own.

    A ``pilot`` takes a small share of the budgets through every step up to the acceptance gate (``PilotSettings``);
    the same edition without it goes on from there. Data sets that are already tokenised wait for that: they cost no
    generation, and would make capture and training as long as in the whole run.

    With ``approvals`` the run asks a person before what is costly and before it publishes.
    """

    datasets: tuple[str, ...] = DATASET_KEYS
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    edition: EditionName = DEFAULT_EDITION
    first: Step = Field(default="prepare", alias="from")
    last: Step = Field(default=LAST_STEP, alias="to")
    force: bool = False
    pilot: bool = False
    approvals: bool = False

    @property
    def selected(self) -> tuple[str, ...]:
        """Data sets that the run works on."""
        return tuple(key for key in self.datasets if not (self.pilot and is_tokenised(key)))

    @property
    def last_step(self) -> str:
        """Last step that the run takes: a pilot never publishes."""
        return min(self.last, PILOT_END, key=STEPS.index) if self.pilot else self.last

    @model_validator(mode="after")
    def _begins_before_it_ends(self) -> Self:
        if STEPS.index(self.first) > STEPS.index(self.last_step):
            raise ValueError(f"from {self.first} to {self.last_step}: expected a first step that is not after the last")
        return self

    @model_validator(mode="after")
    def _pilot_generates(self) -> Self:
        if not self.selected:
            raise ValueError(f"a pilot of {', '.join(self.datasets)}: expected a data set that is generated")
        return self

    def describe(self) -> str:
        """One line for a log."""
        budget = "the configured budgets" if self.budget_tokens is None else f"{self.budget_tokens:,} tokens a data set"
        pilot = "pilot of " if self.pilot else ""
        return f"{pilot}data sets {', '.join(self.selected)}; {budget}; from {self.first} to {self.last_step}"


def run_parameters(form: Mapping[str, Any], *, backfill: bool) -> RunParameters:
    """The parameters of a run from its form; where it has no last step, that depends on the kind of run.

    Raises:
        BadInput: a parameter has a value that the pipeline does not know.
    """
    asked = dict(form)
    if asked.get("to") is None:
        asked["to"] = BACKFILL_END if backfill else LAST_STEP
    try:
        return RunParameters.model_validate(asked)
    except ValidationError as error:
        raise BadInput(f"parameters of the run: {one_line(error)}") from error


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
    if dataset is not None and dataset not in parameters.selected:
        return "outside"
    step = step_of(stage, phase)
    if step not in STEPS:
        return "inside"
    if STEPS.index(step) < STEPS.index(parameters.first):
        return "before"
    return "inside" if STEPS.index(step) <= STEPS.index(parameters.last_step) else "outside"


def stage_request(
    settings: PipelineSettings,
    parameters: RunParameters,
    *,
    run_id: str,
    stage: str | None = None,
    dataset: str | None = None,
    phase: str | None = None,
) -> StageRequest:
    """The request of one task of a run. ``stage`` decides, with the placement, where the server's keeper is."""
    keeper = keeper_of(settings, stage)
    if parameters.budget_tokens is not None:
        settings = settings.with_budget(parameters.budget_tokens)
    if parameters.pilot:
        settings = settings.as_pilot()
    document = {
        "data_root": data_root(),
        "server_folder": server_folder(),
        "keeper": keeper,
        "edition": parameters.edition,
        "dataset": dataset,
        "selected": parameters.selected,
        "phase": phase,
        "run_id": run_id,
        "force": parameters.force,
    }
    return StageRequest.model_validate({"settings": settings, **document})


def setting_lines(request: StageRequest) -> list[str]:
    """What a task was asked, for its log: its request, with the settings of its own data set alone, secrets masked."""
    document = request.model_dump(mode="json", exclude_none=True)
    datasets = document["settings"]["datasets"]
    document["settings"]["datasets"] = {key: datasets[key] for key in datasets if key == request.dataset}
    return [masked(line) for line in yaml.safe_dump(document, sort_keys=False, allow_unicode=True).splitlines()]
