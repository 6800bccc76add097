"""The server that the pipeline's settings ask for: planned, and ensured through its keeper."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aerie.errors import BadInput
from aerie.serving.client import ServerHandle, ensure_server
from aerie.serving.plan import DrafterPlan, Phase, ServerPlan
from aerie.serving.probing import probing_of
from aerie.settings.machine import python_of
from aerie.settings.pipeline import PipelineSettings


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
        raise BadInput(f"{where}: {settings.verifier.path} cannot be read: {error}") from error


def ensure_configured(
    settings: PipelineSettings, plan: ServerPlan, *, folder: Path, owner: str, report: Callable[[str], None]
) -> ServerHandle:
    """Have a ready server of this plan, with the settings' lease and patience.

    Raises:
        AerieError: as ``ensure_server`` raises.
    """
    probing = probing_of(settings, folder)
    return ensure_server(
        plan.model_copy(update={"probing": probing}),
        folder=folder,
        owner=owner,
        python=python_of("serve"),
        lease_seconds=settings.serving.lease_seconds,
        start_timeout_seconds=settings.serving.start_timeout_seconds,
        report=report,
    )
