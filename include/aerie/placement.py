"""Where the stages run under Airflow: executor, queue and pool of each, as the configuration says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.errors import BadInput
from aerie.settings.pipeline import PipelineSettings, PlacementSettings
from aerie.stages import STAGES, KeeperPlace

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

DEFAULT_EXECUTOR = "LocalExecutor"
EDGE_EXECUTOR = "airflow.providers.edge3.executors.EdgeExecutor"
MODULE_OF_EXECUTOR: Mapping[str, str] = {"EdgeExecutor": EDGE_EXECUTOR}
"""Executors that Airflow's configuration knows by their module alone."""

REMOTE_STAGES = ("plan", "serve_start", "serve_stop", "capture", "train", "export")
"""What may run on a host without the database: the others read or write it, or announce what was recorded."""


def placement_arguments(settings: PipelineSettings, stage: str) -> dict[str, Any]:
    """What an operator of ``stage`` is given: ``executor``, ``queue``, ``pool`` and ``pool_slots`` where they are set.

    Raises:
        BadInput: the configuration places a stage that there is not.
    """
    require_sound(settings)
    default, own = (settings.placement.get(name, PlacementSettings()) for name in (DEFAULT, stage))
    placed = {**default.model_dump(exclude_unset=True), **own.model_dump(exclude_unset=True)}
    if own.pool is None and (pool := pool_of(settings, stage)):  # a default pool does not keep apart what must be
        placed |= {"pool": pool, "pool_slots": own.pool_slots}
    return {name: value for name, value in placed.items() if value is not None and name != "remote"}


def pool_of(settings: PipelineSettings, stage: str) -> str | None:
    """The pool of a stage that the configuration gives none; a capture without a server takes the GPUs itself."""
    if stage == "capture" and not settings.hidden_states.captures_in_server:
        return GPU_POOL.name
    return POOL_OF_STAGE.get(stage)


def is_remote(settings: PipelineSettings, stage: str) -> bool:
    """Whether ``stage`` runs on a host that has no database."""
    placement = settings.placement.get(stage)
    return placement is not None and placement.remote


def has_remote(settings: PipelineSettings) -> bool:
    """Whether any stage does."""
    return any(is_remote(settings, stage) for stage in REMOTE_STAGES)


def executors(settings: PipelineSettings) -> tuple[str, ...]:
    """Executors besides Airflow's default that the placement names, as Airflow's configuration has them."""
    named = {placement.executor for placement in settings.placement.values() if placement.executor is not None}
    return tuple(sorted(MODULE_OF_EXECUTOR.get(name, name) for name in named - {DEFAULT_EXECUTOR}))


def keeper_of(settings: PipelineSettings, stage: str | None) -> KeeperPlace:
    """Whose the server's keeper is, seen from where ``stage`` runs."""
    if not is_remote(settings, "serve_start"):
        return "here"
    return "for_others" if stage is not None and is_remote(settings, stage) else "elsewhere"


def require_sound(settings: PipelineSettings) -> None:
    """Refuse a placement that cannot work.

    Raises:
        BadInput: it names a stage that there is not, or puts stages on a host without database that cannot be there.
    """
    require_known_stages(settings)
    remote = {name for name, placement in settings.placement.items() if placement.remote}
    where = f"placement of configuration {settings.name}"
    if wrong := sorted(remote - set(REMOTE_STAGES)):
        raise BadInput(f"{where}: {', '.join(wrong)} cannot be remote: expected {', '.join(REMOTE_STAGES)}")
    if queueless := sorted(name for name in remote if placement_queue(settings, name) is None):
        raise BadInput(f"{where}: {', '.join(queueless)} is remote without a queue: name the one of its host's worker")
    server = remote & {"serve_start", "serve_stop"}
    if len(server) == 1 or ("capture" in remote and not server):
        raise BadInput(f"{where}: serve_start and serve_stop are remote together, and capture only with them")


def placement_queue(settings: PipelineSettings, stage: str) -> str | None:
    """The queue of a stage, None for Airflow's default."""
    default, own = (settings.placement.get(name, PlacementSettings()) for name in (DEFAULT, stage))
    return own.queue or default.queue


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
    """Pools that the DAGs expect of Airflow, each with the slots that its largest task takes, at least Aerie's own.

    Raises:
        BadInput: the placement cannot work.
    """
    known = {pool.name: pool for pool in (SERVER_POOL, GPU_POOL)}
    slots = {name: pool.slots for name, pool in known.items()}
    for stage in STAGES:
        placed = placement_arguments(settings, stage)
        if "pool" in placed:
            slots[placed["pool"]] = max(slots.get(placed["pool"], 1), placed.get("pool_slots", 1))
    others = "Named by the configuration's placement"
    return tuple(
        Pool(name, needed, known[name].description if name in known else others) for name, needed in slots.items()
    )


def pools_to_write(settings: PipelineSettings, existing: Mapping[str, int]) -> tuple[Pool, ...]:
    """The pools to make where Airflow has none of the name, and those to widen to what their largest task takes.

    No pool is ever narrowed: how many tasks share it is for a person to say.

    Args:
        settings: the pipeline's configuration.
        existing: slots of Airflow's pools by name; -1 is without limit.

    Raises:
        BadInput: the placement cannot work.
    """
    return tuple(pool for pool in pools(settings) if 0 <= existing.get(pool.name, 0) < pool.slots)
