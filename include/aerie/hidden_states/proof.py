"""What ``capture`` does for a corpus whose states are streamed: a sample goes through every check, and is not kept."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, iterate_rows
from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.manifest import InputFile, Manifest, answered_by, write_manifest
from aerie.artefacts.state_index import MeasuredState
from aerie.artefacts.state_names import state_name, state_path
from aerie.artefacts.state_stream import clear_stream
from aerie.hidden_states.capturing import capture_rows
from aerie.hidden_states.identity import bind_for, capture_identity
from aerie.hidden_states.last_slot import ROWS, measure_last_slot, require_last_slot
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.parity import is_compared, parity_of_rows
from aerie.hidden_states.streaming import STREAMED, file_bytes
from aerie.stages import Events, StageRequest, StageResult


def prove(
    request: StageRequest,
    corpus: Manifest,
    inputs: list[InputFile],
    layers: CapturedLayers,
    events: Events,
    *,
    limit_bytes: int,
) -> StageResult:
    """Capture a sample, check it in every way, and record what was proved and under what; no state file stays.

    Raises:
        Failed: the states are wrong, or states of another kind, or kept ones, are there.
        AerieError: as the back end raises.
    """
    files, settings = request.files, request.settings
    identity = {**capture_identity(request, layers), "mode": STREAMED}
    fingerprint = fingerprint_of({"corpus": corpus.counts["corpus_fingerprint"], **identity})
    manifest_path = files.manifest("capture")
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None and is_compared(answer, rows=settings.hidden_states.parity_rows):
        events.progress(f"nothing to do: the capture of this corpus was proved on {answer.counts['files']} rows")
        return StageResult(stage="capture", reused=True, manifest=answer)
    manifest_path.unlink(missing_ok=True)
    bind_for(request, identity)
    clear_stream(files.hidden_states, files.states)
    started = time.monotonic()
    every, first = corpus.counts["rows"], settings.hidden_states.parity_rows
    rows = list(sample_rows(files, layers, rows=every, first=first, limit_bytes=limit_bytes))
    captured = capture_rows(request, layers, events, lambda: iter(rows), count=len(rows))
    sample = captured.states
    seconds = time.monotonic() - started
    counts = {
        "mode": STREAMED,
        "files": len(sample),
        "bytes": sum(state.bytes for state in sample),
        "tokens": sum(state.tokens for state in sample),
        "captured_tokens": captured.progress.captured_tokens,
        "tokens_per_second": captured.progress.tokens_per_second,
        "backend": settings.hidden_states.backend,
        "seconds": round(seconds, 1),
        "layers": list(layers.auxiliary),
        "slots": layers.slots,
        "hidden_size": layers.hidden_size,
        "dtype": layers.dtype,
        "corpus_fingerprint": corpus.counts["corpus_fingerprint"],
        **_examine(request, rows, sample, layers, events),
    }
    clear_stream(files.hidden_states, files.states)
    manifest = write_manifest(
        manifest_path,
        stage="capture",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[],
        counts=counts,
    )
    events.progress(f"proved the capture on {len(sample)} of {every} rows; all states are streamed to the trainer")
    return StageResult(stage="capture", reused=False, manifest=manifest)


def sample_rows(
    files: EditionFiles, layers: CapturedLayers, *, rows: int, first: int, limit_bytes: int
) -> Iterator[CorpusRow]:
    """The ``first`` of the corpus' ``rows`` and some evenly spaced ones, as many as ``limit_bytes`` hold."""
    step = -(-rows // ROWS)
    for row in iterate_rows(files.corpus / DATASET_FOLDER):
        if row.row >= first and row.row % step:
            continue
        limit_bytes -= file_bytes(len(row.input_ids), layers)
        if limit_bytes < 0:
            return
        yield row


def _examine(
    request: StageRequest,
    rows: list[CorpusRow],
    states: list[MeasuredState],
    layers: CapturedLayers,
    events: Events,
) -> dict[str, Any]:
    """Parity with transformers, what the verifier's head reads in the last slot, and each slot's median magnitude."""
    files, settings = request.files, request.settings
    parity = parity_of_rows(rows, files.states, layers, settings, events)
    last_slot = measure_last_slot(
        rows, lambda row: state_path(files.states, state_name(row.sample_id)), settings.verifier.path
    )
    require_last_slot(last_slot, files.hidden_states)
    return {
        "parity": vars(parity) if parity else None,
        "last_slot": asdict(last_slot),
        "median_rms": np.median([state.rms for state in states], axis=0).tolist(),
    }
