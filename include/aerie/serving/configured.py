"""The server that the pipeline's settings ask for: planned, and ensured through its keeper."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aerie.errors import BadInput, one_line
from aerie.serving.calibration import deviation
from aerie.serving.client import (
    POOLED_QUEUE_SECONDS,
    QUEUE_SECONDS,
    ServerHandle,
    ensure_server,
    status,
    use_external,
)
from aerie.serving.errors import OutOfMemory
from aerie.serving.plan import DrafterPlan, Phase, ServerPlan
from aerie.serving.preflight import PreflightOptions
from aerie.serving.probing import probing_of
from aerie.serving.reductions import reduced, reductions_path
from aerie.settings.machine import python_of
from aerie.settings.pipeline import PipelineSettings, ServingSettings
from aerie.stages import Events, KeeperPlace, StageRequest


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
        raise BadInput(f"{where}: {one_line(error)}") from error
    except OSError as error:
        verifier = settings.verifier
        raise BadInput(f"{where}: {verifier.path} cannot be read: {error}; {verifier.where_from}") from error


def ensure_configured(
    settings: PipelineSettings,
    plan: ServerPlan,
    *,
    folder: Path,
    owner: str,
    events: Events,
    queue_seconds: float = QUEUE_SECONDS,
    keeper: KeeperPlace = "here",
) -> ServerHandle:
    """Have a ready server of this plan, with the settings' lease and patience; or check that someone else's is one.

    A plan that runs out of memory is tried once more, smaller, and stays smaller (``aerie.serving.reductions``).

    Its lease, and what it turned out to hold, are handed on to the store; where that is not what was planned, a person
    is told.

    Raises:
        OutOfMemory: the smaller plan does not fit either.
        AerieError: as ``ensure_server`` and ``use_external`` raise.
    """
    probing = probing_of(settings, folder)
    if settings.serving.external_url is not None:
        events.progress(f"using the server at {settings.serving.external_url}, which someone else owns")
        return use_external(
            settings.serving.external_url, plan.model_copy(update={"probing": probing}), folder=folder, owner=owner
        )

    def ensure(asked: ServerPlan) -> ServerHandle:
        return ensure_server(
            asked.model_copy(update={"probing": probing}),
            folder=folder,
            owner=owner,
            python=None if keeper == "elsewhere" else python_of("serve"),
            keeper_stays=keeper == "for_others",
            lease_seconds=settings.serving.lease_seconds,
            start_timeout_seconds=settings.serving.start_timeout_seconds,
            queue_seconds=queue_seconds,
            preflight=_preflight_options(settings.serving),
            report=events.progress,
        )

    handle = ensure_or_smaller(plan, ensure, folder=folder, report=events.progress, alert=events.alert)
    if lease := status(folder):
        events.lease(lease.model_dump(mode="json"))
    hand_on_observation(handle, events)
    return handle


def ensure_for_stage(request: StageRequest, plan: ServerPlan, events: Events) -> ServerHandle:
    """Have a ready server of this plan for a stage that uses it, held in the name of its run.

    Raises:
        AerieError: as ``ensure_configured`` raises.
    """
    return ensure_configured(
        request.settings,
        plan,
        folder=request.server_folder,
        owner=request.run_id,
        events=events,
        queue_seconds=POOLED_QUEUE_SECONDS,
        keeper=request.keeper,
    )


def ensure_or_smaller(
    plan: ServerPlan,
    ensure: Callable[[ServerPlan], ServerHandle],
    *,
    folder: Path,
    report: Callable[[str], None],
    alert: Callable[[str, str], None],
) -> ServerHandle:
    """Have a server of the plan, or of the smaller one that is recorded where it runs out of memory; never silently.

    Raises:
        OutOfMemory: the smaller plan does not fit either.
        AerieError: as ``ensure`` raises.
    """
    asked, reduction = reduced(folder, plan)
    try:
        handle = ensure(asked)
    except OutOfMemory as failure:
        asked, new = reduced(folder, plan)
        if new is None or new == reduction:  # it was smaller already
            raise
        report(f"{type(failure).__name__}: {failure}; trying once more, smaller")
        reduction = new
        handle = ensure(asked)
    if reduction is not None:
        server = f"the {plan.phase} server {handle.url}"
        message = f"{server} is smaller than planned: {reduction} (recorded in {reductions_path(folder)})"
        report(message) if handle.reused else alert("out_of_memory", message)
    return handle


def _preflight_options(serving: ServingSettings) -> PreflightOptions:
    return PreflightOptions(
        host_ram_gb=serving.host_ram_gb,
        host_loading_gb=serving.host_loading_gb,
        reap_leftovers=serving.reap_leftovers,
    )


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
