"""What an edition's state files were captured under: states of two kinds are never mixed."""

import json
import shutil
from pathlib import Path
from typing import Any

from aerie.artefacts.files import write_json
from aerie.artefacts.layout import EditionFiles
from aerie.errors import Failed
from aerie.hidden_states.checkpoint import checkpoint_fingerprint
from aerie.hidden_states.layers import CapturedLayers
from aerie.serving.plan import FULL_PRECISION_KV
from aerie.settings.pipeline import ServingSettings
from aerie.stages import StageRequest

CAPTURE_VERSION = 1
"""Raised when the same corpus and verifier would give other states."""

IDENTITY_FILE = "capture.json"
FORCED_FILE = "forced.json"
"""Beside it: the run whose ``--force`` discarded what was there before."""


def capture_identity(request: StageRequest, layers: CapturedLayers) -> dict[str, Any]:
    """What the values of a state file depend on besides its tokens; the defaults of later settings go unsaid."""
    verifier = request.settings.verifier
    backend = request.settings.hidden_states.backend
    return {
        "version": CAPTURE_VERSION,
        "verifier": checkpoint_fingerprint(verifier.path),
        "verifier_dtype": verifier.dtype,
        "layers": list(layers.auxiliary),
        "hidden_size": layers.hidden_size,
        "dtype": layers.dtype,
        **(_of_the_server(request.settings.serving) if backend == "sglang" else {"backend": backend}),
        **({} if layers.storage == "plain" else {"storage": layers.storage}),
    }


def _of_the_server(serving: ServingSettings) -> dict[str, str]:
    """What makes a server compute other states of the same checkpoint; full precision goes unsaid, however named."""
    quantisation = serving.extra_argument("--quantization")
    return {
        **({} if quantisation is None else {"quantisation": quantisation}),
        **({} if serving.kv_cache_dtype in FULL_PRECISION_KV else {"kv_cache_dtype": serving.kv_cache_dtype}),
    }


def bind_states(files: EditionFiles, identity: dict[str, Any], *, discard: bool) -> None:
    """Tie the edition's state files to ``identity``; those of another identity are refused.

    ``discard``: whatever is there is discarded, of the same identity too.

    Raises:
        Failed: there are states of another identity; the message shows the difference.
    """
    folder = files.hidden_states
    if discard:
        _discard(files)
    found = read_identity(folder)
    if found is not None and found != identity:
        changed = ", ".join(
            f"{name} {found.get(name)} -> {identity.get(name)}"
            for name in sorted({*found, *identity})
            if found.get(name) != identity.get(name)
        )
        raise Failed(
            f"{folder}: holds states captured under other conditions ({changed}); capture with --force (and without "
            "--rank) to discard them, or use another edition"
        )
    files.states.mkdir(parents=True, exist_ok=True)
    if read_identity(folder) != identity:
        write_json(folder / IDENTITY_FILE, identity)


def bind_for(request: StageRequest, identity: dict[str, Any]) -> bool:
    """``bind_states`` for a capture; a forced one discards what is there, once a run, and says so.

    Raises:
        Failed: as ``bind_states``, where it is not forced.
    """
    folder = request.files.hidden_states
    discard = force_is_due(request) or (request.force and read_identity(folder) != identity)
    bind_states(request.files, identity, discard=discard)
    if discard:
        write_json(folder / FORCED_FILE, {"run_id": request.run_id})
    return discard


def force_is_due(request: StageRequest) -> bool:
    """Whether this run is forced and has discarded nothing yet: its retries keep what its first try captured."""
    if not request.force:
        return False
    path = request.files.hidden_states / FORCED_FILE
    return not path.exists() or json.loads(path.read_text(encoding="utf-8"))["run_id"] != request.run_id


def _discard(files: EditionFiles) -> None:
    """Remove all states; what says whose they are goes last, so that what an interruption leaves is never taken up."""
    for folder in (files.states, files.hidden_states):
        if folder.exists():
            shutil.rmtree(folder)


def read_identity(folder: Path) -> dict[str, Any] | None:
    """What the state files in ``folder`` were captured under, None where there are none."""
    path = folder / IDENTITY_FILE
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
