"""The server that generation asks for, and whether what runs there is what was planned."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import requests

from aerie.artefacts.files import write_text
from aerie.errors import AerieError, BadInput
from aerie.generation.client import HEALTH_SECONDS, ServerInfo
from aerie.hidden_states.launch import generation_hooks
from aerie.serving.client import ServerHandle, evidence, renew, stop
from aerie.serving.configured import ensure_for_stage, plan_configured
from aerie.serving.errors import KeeperUnreachable, NotReady
from aerie.serving.evidence import Evidence
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest

SILENCE_POLL_SECONDS = 1.0
QUANTISED_KV_PREFIXES = ("fp8", "fp4", "int8", "int4")


@dataclass(frozen=True)
class Server:
    """A server that runs.

    ``renew`` keeps its lease, raises Retryable when the server is gone, and returns how busy the GPUs of its host are
    (share of the time, None where there are none). ``end_stuck`` gathers what can be known of this launch and ends it;
    None where the server is somebody else's.
    """

    url: str
    launch_token: str
    renew: Callable[[], float | None]
    end_stuck: Callable[[], "StuckServer"] | None = None


@dataclass(frozen=True)
class StuckServer:
    """A server that was ended because it was stuck: what was known of it, and the file that tells it."""

    evidence: Evidence
    path: Path


def ensure(request: StageRequest, events: Events) -> Server:
    """Have the server that the settings plan for generation, started where it is not there.

    Raises:
        BadInput: the settings cannot be served.
        AerieError: as ``aerie.serving.client.ensure_server`` raises.
    """
    settings = request.settings
    plan = plan_configured(settings, "generate", forward_hooks=generation_hooks(request))
    handle = ensure_for_stage(request, plan, events)
    renewal = Renewal(handle, settings.serving.lease_seconds, events.progress)
    end = None if handle.external_identity is not None else lambda: end_stuck(handle)
    return Server(handle.url, handle.launch_token, renewal, end)


class Renewal:
    """Renews a lease; a keeper, or an external server, that does not answer is forgiven while the lease still holds."""

    def __init__(self, handle: ServerHandle, lease_seconds: float, report: Callable[[str], None]) -> None:
        self._handle = handle
        self._lease_seconds = lease_seconds
        self._report = report
        self._renewed_at = time.monotonic()

    def __call__(self) -> float | None:
        """Renew, and return how busy the GPUs of the server's host are.

        Raises:
            AerieError: as ``aerie.serving.client.renew`` raises: the server has died, or is somebody else's.
        """
        began = time.monotonic()
        try:
            gpu_utilisation = renew(self._handle, lease_seconds=self._lease_seconds)
        except (KeeperUnreachable, NotReady) as error:
            if time.monotonic() - self._renewed_at > self._lease_seconds / 2:
                raise
            self._report(f"the lease could not be renewed yet: {error}")
            return None
        self._renewed_at = began
        return gpu_utilisation


def end_stuck(handle: ServerHandle) -> StuckServer:
    """Save what can be known of a server that is stuck, and end that launch, whoever else uses it.

    Raises:
        LeaseLost: it was ended or replaced already.
        AerieError: the keeper does not answer, or processes are left.
    """
    found = evidence(handle.folder, handle.launch_token)
    path = handle.folder / "evidence" / f"{handle.launch_token}.json"
    write_text(path, found.model_dump_json(indent=2) + "\n")
    stop(handle.folder, launch_token=handle.launch_token)
    return StuckServer(evidence=found, path=path)


def summary_of(stuck: StuckServer) -> str:
    """One line: its last log line, what its last probe found, whether there are stacks, and where it all is."""
    found = stuck.evidence
    last = found.log_tail[-1] if found.log_tail else "none"
    when = time.strftime("%H:%M:%S UTC", time.gmtime(found.last_probe.probed_at)) if found.last_probe else "never"
    stacks = "without stacks, since py-spy is not installed" if found.stacks is None else "with the stacks of py-spy"
    return f"Last line of its log: {last!r}; last proven healthy: {when}; evidence, {stacks}: {stuck.path}"


def stays_silent(server: Server, seconds: float) -> bool:
    """Whether a server whose launch lives gives no sign of health for so long: then it is stuck, and not only slow."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            server.renew()
        except AerieError:
            return False  # it has died or was replaced: whoever ensures it next gets another
        try:
            if requests.get(f"{server.url}/health", timeout=HEALTH_SECONDS).ok:
                return False
        except requests.RequestException:
            pass
        time.sleep(SILENCE_POLL_SECONDS)
    return True


def check_server(info: ServerInfo, settings: PipelineSettings, *, url: str) -> None:
    """Refuse a server that would produce other tokens than the settings say.

    Raises:
        BadInput: it serves another model, rewrites responses (a parser), quantises its KV cache or drafts; the message
            names every difference.
    """
    verifier = settings.verifier
    wrong = []
    if Path(info.model_path).resolve() != verifier.path.resolve():
        wrong.append(f"it serves {info.model_path}, expected {verifier.path}")
    if verifier.revision is not None and info.revision not in (None, verifier.revision):
        wrong.append(f"it serves revision {info.revision}, expected {verifier.revision}")
    if info.dtype not in ("auto", verifier.dtype):
        wrong.append(f"it computes in {info.dtype}, expected {verifier.dtype}")
    for name, parser in (("reasoning", info.reasoning_parser), ("tool-call", info.tool_call_parser)):
        if parser is not None:
            wrong.append(f"it runs the {name} parser {parser}, which rewrites what the model produced: expected none")
    quantised = info.kv_cache_dtype.startswith(QUANTISED_KV_PREFIXES)
    if quantised and not (
        settings.serving.allow_quantised_kv and info.kv_cache_dtype == settings.serving.kv_cache_dtype
    ):
        wrong.append(f"its KV cache is {info.kv_cache_dtype}, which degrades the model: expected auto or bf16")
    if info.speculative_algorithm is not None:
        wrong.append(f"it drafts with {info.speculative_algorithm}: expected no speculative decoding")
    if wrong:
        raise BadInput(
            f"the server at {url} is not the one planned: {'; '.join(wrong)}. Stop it and start it as planned"
        )
