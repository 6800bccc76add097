"""The server that generation asks for, and whether what runs there is what was planned."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aerie.errors import BadInput
from aerie.generation.client import ServerInfo
from aerie.settings.pipeline import PipelineSettings

QUANTISED_KV_PREFIXES = ("fp8", "fp4", "int8", "int4")


@dataclass(frozen=True)
class Server:
    """A server that runs. ``renew`` keeps its lease and raises Retryable when the server is gone."""

    url: str
    launch_token: str
    renew: Callable[[], None]


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
