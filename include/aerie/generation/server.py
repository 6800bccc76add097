"""The server that generation asks for, and whether what runs there is what was planned."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aerie.errors import BadInput
from aerie.generation.client import ServerInfo
from aerie.serving.client import ServerHandle, renew
from aerie.serving.configured import ensure_configured, plan_configured
from aerie.serving.errors import KeeperUnreachable
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest

QUANTISED_KV_PREFIXES = ("fp8", "fp4", "int8", "int4")


@dataclass(frozen=True)
class Server:
    """A server that runs.

    ``renew`` keeps its lease, raises Retryable when the server is gone, and returns how busy the GPUs of its host are
    (share of the time, None where there are none).
    """

    url: str
    launch_token: str
    renew: Callable[[], float | None]


def ensure(request: StageRequest, events: Events) -> Server:
    """Have the server that the settings plan for generation, started where it is not there.

    Raises:
        BadInput: the settings cannot be served.
        AerieError: as ``aerie.serving.client.ensure_server`` raises.
    """
    settings = request.settings
    handle = ensure_configured(
        settings,
        plan_configured(settings, "generate"),
        folder=request.server_folder,
        owner=request.run_id,
        events=events,
    )
    return Server(handle.url, handle.launch_token, Renewal(handle, settings.serving.lease_seconds, events.progress))


class Renewal:
    """Renews a lease; a keeper that does not answer is forgiven while the lease still holds."""

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
            lease = renew(self._handle, lease_seconds=self._lease_seconds)
        except KeeperUnreachable as error:
            if time.monotonic() - self._renewed_at > self._lease_seconds / 2:
                raise
            self._report(f"the lease could not be renewed yet: {error}")
            return None
        self._renewed_at = began
        return lease.gpu_utilisation


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
