"""The server's plan, start and stop as stages: one server per phase, around the work that needs it.

Whoever needs the server ensures it himself on every try; starting it ahead only moves the wait out of the first task.
"""

from collections.abc import Iterator
from pathlib import Path

from aerie.artefacts.manifest import Manifest, describe_input, path_of, read_manifest
from aerie.errors import BadInput
from aerie.hidden_states.launch import capture_hooks
from aerie.serving import client
from aerie.serving.attention import attention_of, kv_dtype_bytes
from aerie.serving.configured import ensure_configured, plan_configured
from aerie.serving.model_config import read_model_config
from aerie.serving.plan import Phase, ServerPlan
from aerie.settings.machine import python_of
from aerie.stages import Events, StageRequest, StageResult


def plan(request: StageRequest, events: Events) -> StageResult:
    """Show what the server will be, before anything starts.

    Raises:
        BadInput: the settings make no plan, or the verifier's configuration cannot be read.
        PlanRefused: the planner does not know the verifier's attention.
    """
    asked = _plan(request, "generate")
    attention = attention_of(read_model_config(asked.model_path), ranks=asked.tensor_parallel_size)
    token_bytes = attention.bytes_per_token(kv_dtype_bytes(asked.kv_cache_dtype, asked.dtype))
    command = asked.command_line(python_of("serve"), port=asked.port or 0)
    events.progress(f"KV cache: {token_bytes:,} bytes a token and rank")
    if asked.max_total_tokens is not None:
        events.progress(
            f"KV pool: {asked.max_total_tokens:,} tokens, {asked.max_total_tokens * token_bytes / 1e9:.2f} GB"
        )
    events.progress(f"command (port chosen at launch): {' '.join(command)}")
    return StageResult(stage="plan", reused=False, data={"bytes_per_token": token_bytes, "command": command})


def start(request: StageRequest, events: Events) -> StageResult:
    """Start the phase's server, unless its work looks done already.

    Raises:
        AerieError: the server cannot be started; the message says why and names its log.
    """
    if not request.force and all(map(_looks_done, _manifests(request))):
        events.progress(f"nothing to do: what phase {request.phase} needs a server for is there already")
        return StageResult(stage="serve_start", reused=True)
    handle = ensure_configured(
        request.settings,
        _plan(request, _phase(request)),
        folder=request.server_folder,
        owner=request.run_id,
        events=events,
    )
    events.progress(f"server {handle.url} is ready: {handle.max_total_num_tokens:,} KV tokens; log: {handle.log_path}")
    lease = client.status(request.server_folder)
    data = {"url": handle.url, "launch_token": handle.launch_token, "log_path": str(handle.log_path)}
    document = lease.model_dump(mode="json") if lease else None
    return StageResult(stage="serve_start", reused=handle.reused, data={**data, "lease": document})


def stop(request: StageRequest, events: Events) -> StageResult:
    """End the run's hold of the server; when nobody else holds it, it is stopped, and that it is gone verified.

    Raises:
        ProcessesLeft: its processes survive; the message names them.
    """
    before = client.status(request.server_folder)
    if before is None:
        events.progress("nothing to do: no server runs")
        return StageResult(stage="serve_stop", reused=True)
    left = client.release(request.server_folder, request.run_id)
    if left is not None:
        events.progress(f"server {left.url} stays for others: it is held by {left.held_by}")
        return StageResult(stage="serve_stop", reused=False)
    events.progress("the server is stopped, no process is left")
    return StageResult(stage="serve_stop", reused=False, data={"launch_token": before.launch_token})


def _phase(request: StageRequest) -> Phase:
    if request.phase is None:
        raise BadInput("this stage needs to know what the server is for: the request must name it in 'phase'")
    return request.phase


def _plan(request: StageRequest, phase: Phase) -> ServerPlan:
    hooks = capture_hooks(request) if phase == "capture" else ()
    return plan_configured(request.settings, phase, forward_hooks=hooks)


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
