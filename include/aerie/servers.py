"""The server's plan, start and stop as stages: one server per phase, around the work that needs it.

Whoever needs the server ensures it himself on every try; starting it ahead only moves the wait out of the first task.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from aerie.artefacts.manifest import Manifest, describe_input, path_of, read_manifest
from aerie.errors import BadInput
from aerie.hidden_states.launch import capture_hooks, generation_hooks
from aerie.plan_report import document_of, text_of
from aerie.plan_subjects import subject_of_settings
from aerie.plans import Machine, WholePlan, make_plan, observations_of
from aerie.serving import client
from aerie.serving.configured import ensure_configured, plan_configured
from aerie.serving.host import host_facts, host_facts_of
from aerie.serving.plan import Phase, ServerPlan
from aerie.serving.timeline import finished_in, only
from aerie.settings.machine import python_of
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest, StageResult

RUN_PHASES: tuple[Phase, ...] = ("generate", "capture", "benchmark")
"""What a run may have a server for."""


def phases_of(settings: PipelineSettings) -> tuple[Phase, ...]:
    """What a run of these settings has a server for."""
    return tuple(phase for phase in RUN_PHASES if settings.hidden_states.captures_in_server or phase != "capture")


def _without_server(settings: PipelineSettings) -> str:
    hidden_states = settings.hidden_states
    if hidden_states.backend != "sglang":
        return f"hidden_states.backend is {hidden_states.backend}, which captures without a server of ours"
    return f"hidden_states.world_size is {hidden_states.world_size}: each rank captures with a server of its own"


def plan(request: StageRequest, events: Events) -> StageResult:
    """Show what the servers of the run will be and how long it takes, before anything starts.

    Raises:
        BadInput: the settings make no plan, or the verifier's configuration cannot be read.
        PlanRefused: a phase cannot work, or the planner does not know the verifier's attention.
    """
    if request.settings.serving.backend == "external":
        events.progress(f"{request.settings.serving.external_url} is someone else's server: its owner plans its memory")
        return StageResult(stage="plan", reused=False, data={"verdict": None})
    plan_of(request, "generate")  # the verifier must be there, whatever a bundled configuration would allow to plan
    whole = plan_here(request, phases_of(request.settings))
    if whole is None:
        events.progress("no GPU can be seen from here: the keeper checks the plan where it starts the server")
        return StageResult(stage="plan", reused=False, data={"verdict": None})
    python = python_of("serve")
    events.block("Plan of the servers", text_of(whole, python).splitlines())
    events.progress(f"the plan {whole.verdict}: {'; '.join(whole.reasons)}")
    whole.require_fit()
    return StageResult(stage="plan", reused=False, data=document_of(whole, python))


def plan_here(request: StageRequest, phases: Sequence[Phase]) -> WholePlan | None:
    """The plan of a run on the machine of this process, with what its launches reported before.

    None where its GPUs cannot be seen, and were not observed: the keeper refuses what they cannot hold.

    Raises:
        AerieError: as ``make_plan`` and ``host_facts_of`` raise.
    """
    settings = only(request.settings, request.selected)
    subject = subject_of_settings(settings, edition_folder=request.files.folder)
    facts = host_facts() if settings.serving.device == "cpu" else host_facts_of(python_of("serve"))
    machine = Machine.of_facts(facts, device=settings.serving.device)
    if machine.gpu_memory_gib is None and not subject.observed_enough:
        return None
    return make_plan(
        subject,
        machine,
        phases=phases,
        measured=finished_in(request.files, settings),
        observations=observations_of(subject, request.server_folder),
    )


def start(request: StageRequest, events: Events) -> StageResult:
    """Start the phase's server, unless its work looks done already.

    Raises:
        AerieError: the server cannot be started; the message says why and names its log.
    """
    phase = _phase(request)
    if phase not in phases_of(request.settings):
        events.progress(f"nothing to do: {_without_server(request.settings)}")
        return StageResult(stage="serve_start", reused=True)
    nothing_to_do = _nothing_to_do(request)
    if nothing_to_do is not None:
        events.progress(nothing_to_do)
        if request.keeper == "for_others" and request.settings.serving.backend == "local":
            # Whoever does the work decides for good whether it is done, and could not start a keeper.
            host = request.settings.serving.host
            client.find_or_start_keeper(request.server_folder, python_of("serve"), host, stays=True)
        return StageResult(stage="serve_start", reused=True)
    if request.settings.serving.backend == "local" and (whole := plan_here(request, (phase,))):
        whole.require_fit()
    handle = ensure_configured(
        request.settings,
        plan_of(request, phase),
        folder=request.server_folder,
        owner=request.run_id,
        events=events,
        keeper=request.keeper,
    )
    log = f"log: {handle.log_path}" if handle.log_path else "its log is with its owner"
    events.progress(f"server {handle.url} is ready: {handle.max_total_num_tokens:,} KV tokens; {log}")
    data = {"url": handle.url, "launch_token": handle.launch_token}
    if handle.log_path is None:
        return StageResult(stage="serve_start", reused=True, data=data)
    data["log_path"] = str(handle.log_path)
    return StageResult(stage="serve_start", reused=handle.reused, data=data)


def stop(request: StageRequest, events: Events) -> StageResult:
    """End the run's hold of the server; when nobody else holds it, it is stopped, and that it is gone verified.

    Raises:
        ProcessesLeft: its processes survive; the message names them.
    """
    if request.settings.serving.backend == "external":
        events.progress(f"{request.settings.serving.external_url} is someone else's server: it is left running")
        return StageResult(stage="serve_stop", reused=True)
    before = client.status(request.server_folder)
    if before is None:
        if request.keeper == "for_others":  # the keeper has stayed
            client.release(request.server_folder, request.run_id)
        events.progress("nothing to do: no server runs")
        return StageResult(stage="serve_stop", reused=True, data={"ended": "found gone by its run"})
    left = client.release(request.server_folder, request.run_id)
    if left is not None:
        events.progress(f"server {left.url} stays for others: it is held by {left.held_by}")
        return StageResult(stage="serve_stop", reused=False)
    events.progress("the server is stopped, no process is left")
    return StageResult(
        stage="serve_stop", reused=False, data={"launch_token": before.launch_token, "ended": "stopped by its run"}
    )


def _nothing_to_do(request: StageRequest) -> str | None:
    """Why no server is started ahead; who does the work starts one where it is needed after all."""
    if request.phase == "capture" and request.settings.hidden_states.capture == "generate":
        return "states were captured while generating: capture starts a server where some are missing"
    if not request.force and all(map(_looks_done, _manifests(request))):
        return f"nothing to do: what phase {request.phase} needs a server for is there already"
    return None


def _phase(request: StageRequest) -> Phase:
    if request.phase is None:
        raise BadInput("this stage needs to know what the server is for: the request must name it in 'phase'")
    return request.phase


def plan_of(request: StageRequest, phase: Phase) -> ServerPlan:
    """The plan of the server that a phase of the request's edition needs, without a drafter.

    Raises:
        BadInput: the settings make no plan, or the edition has no forecast that names what capture takes.
    """
    hooks = {"capture": capture_hooks, "generate": generation_hooks}
    return plan_configured(request.settings, phase, forward_hooks=hooks[phase](request) if phase in hooks else ())


def _manifests(request: StageRequest) -> Iterator[Path]:
    """Manifests of the work that the phase's server is for."""
    if request.phase != "generate":
        yield request.files.manifest(_phase(request))
        return
    for key in request.selected:
        if request.settings.dataset(key).kind == "generated":
            yield request.files.dataset(key).manifest("generate")


def _looks_done(path: Path) -> bool:
    """Whether a manifest is there and its inputs are what they were; whoever does the work decides for good."""
    if not path.exists():
        return False
    return _inputs_unchanged(read_manifest(path))


def _inputs_unchanged(manifest: Manifest) -> bool:
    paths = [(path_of(source.uri), source.sha256) for source in manifest.inputs]
    return all(path.is_file() and describe_input(path).sha256 == sha256 for path, sha256 in paths)
