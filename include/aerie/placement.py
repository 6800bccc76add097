"""Where the stages run under Airflow: executor, queue and pool of each, as the configuration says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.errors import BadInput
from aerie.settings.pipeline import PipelineSettings, PlacementSettings
from aerie.stages import STAGES

DEFAULT = "default"
"""The placement of stages that have none of their own."""


@dataclass(frozen=True)
class Pool:
    """A pool of Airflow's: so many tasks at a time do what ``description`` says."""

    name: str
    slots: int
    description: str


SERVER_POOL = Pool("aerie_server", 1, "Tasks that drive the inference server; it serves one at a time")
GPU_POOL = Pool("aerie_gpus", 1, "Tasks that take the GPUs of the host: the server's start, and training")

POOL_OF_STAGE: Mapping[str, str] = {
    **dict.fromkeys(("generate", "capture", "benchmark", "benchmark_drafter"), SERVER_POOL.name),
    **dict.fromkeys(("serve_start", "train"), GPU_POOL.name),
}
"""Pools of the stages that the configuration gives none."""


def placement_arguments(settings: PipelineSettings, stage: str) -> dict[str, Any]:
    """What an operator of ``stage`` is given: ``executor``, ``queue``, ``pool`` and ``pool_slots`` where they are set.

    Raises:
        BadInput: the configuration places a stage that there is not.
    """
    require_known_stages(settings)
    default, own = (settings.placement.get(name, PlacementSettings()) for name in (DEFAULT, stage))
    placed = {**default.model_dump(exclude_unset=True), **own.model_dump(exclude_unset=True)}
    if own.pool is None and stage in POOL_OF_STAGE:  # a default pool does not keep apart what must be
        placed |= {"pool": POOL_OF_STAGE[stage], "pool_slots": own.pool_slots}
    return {name: value for name, value in placed.items() if value is not None}


def require_known_stages(settings: PipelineSettings) -> None:
    """Refuse a placement of a stage that there is not.

    Raises:
        BadInput: names it, and the stages.
    """
    unknown = [name for name in settings.placement if name not in (DEFAULT, *STAGES)]
    if unknown:
        raise BadInput(
            f"placement of configuration {settings.name} has {', '.join(map(repr, unknown))}: expected stages "
            f"({', '.join(STAGES)}) or {DEFAULT!r}"
        )


def pools(settings: PipelineSettings) -> tuple[Pool, ...]:
    """Pools that the DAGs expect of Airflow: Aerie's, and those that the configuration names, as large as it needs."""
    known = (SERVER_POOL, GPU_POOL)
    named: dict[str, int] = {}
    for placement in settings.placement.values():
        if placement.pool is not None:
            named[placement.pool] = max(named.get(placement.pool, 0), placement.pool_slots)
    others = {name: slots for name, slots in named.items() if name not in {pool.name for pool in known}}
    return (*known, *(Pool(name, slots, "Named by the configuration's placement") for name, slots in others.items()))
