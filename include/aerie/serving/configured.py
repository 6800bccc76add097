"""The server that the pipeline's settings ask for: planned, and ensured through its keeper."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aerie.errors import BadInput
from aerie.serving.calibration import deviation
from aerie.serving.client import ServerHandle, ensure_server
from aerie.serving.plan import DrafterPlan, Phase, ServerPlan
from aerie.serving.probing import probing_of
from aerie.settings.machine import python_of
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events


def plan_configured(
    settings: PipelineSettings,
    phase: Phase,
    *,
    drafter: DrafterPlan | None = None,
    forward_hooks: Sequence[Mapping[str, Any]] = (),
) -> ServerPlan:
    """The plan that the settings make for a phase.

    Raises:
        BadInput: the settings cannot be served in this phase, or the verifier cannot be read.
    """
    where = f"configuration {settings.name}: no {phase} server can be planned"
    try:
        return ServerPlan.of_settings(settings, phase, drafter=drafter, forward_hooks=tuple(forward_hooks))
    except ValidationError as error:
        raise BadInput(f"{where}: {'; '.join(one['msg'] for one in error.errors())}") from error
    except OSError as error:
        verifier = settings.verifier
        raise BadInput(f"{where}: {verifier.path} cannot be read: {error}; {verifier.where_from}") from error


def ensure_configured(
    settings: PipelineSettings, plan: ServerPlan, *, folder: Path, owner: str, events: Events
) -> ServerHandle:
    """Have a ready server of this plan, with the settings' lease and patience.

    What it turned out to hold is handed on to the store; where that is not what was planned, a person is told.

    Raises:
        AerieError: as ``ensure_server`` raises.
    """
    probing = probing_of(settings, folder)
    handle = ensure_server(
        plan.model_copy(update={"probing": probing}),
        folder=folder,
        owner=owner,
        python=python_of("serve"),
        lease_seconds=settings.serving.lease_seconds,
        start_timeout_seconds=settings.serving.start_timeout_seconds,
        report=events.progress,
    )
    hand_on_observation(handle, events)
    return handle


def hand_on_observation(handle: ServerHandle, events: Events) -> None:
    """Hand on to the store what the server's launch turned out to hold, and tell of a new one how well it was planned.

    Every stage that uses the server does so: the store keeps a launch once.
    """
    observation = handle.observation
    if observation is None:
        return
    events.observation(observation.model_dump(mode="json"))
    if handle.reused:
        return
    if told := deviation(observation):
        events.alert("kv_pool_off_plan", told)
    else:
        events.progress(
            f"KV pool as planned: {observation.max_total_num_tokens:,} tokens, "
            f"{observation.predicted_max_total_num_tokens:,} were predicted"
        )
