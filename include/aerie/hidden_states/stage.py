"""The stages ``forecast`` and ``capture``."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aerie.artefacts.corpus import DATASET_FOLDER, iterate_batches, iterate_rows
from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.manifest import Manifest, answered_by, describe_output, read_manifest, write_manifest
from aerie.artefacts.state_files import link_path, link_rows, read_fp8_error, state_name
from aerie.artefacts.state_index import (
    INDEX_FILE,
    IndexedState,
    iterate_index,
    shard_index,
    write_index,
    write_shard_index,
)
from aerie.artefacts.state_names import folder_bytes, present_tokens
from aerie.corpus.boundaries import require_sound_rows
from aerie.corpus.stage import read_corpus
from aerie.errors import BadInput, Failed
from aerie.hidden_states.capturing import CapturedRows, capture_rows, require_magnitudes
from aerie.hidden_states.forecast import EXPECTED, CaptureRate, Forecast, forecast_disk, require_fit
from aerie.hidden_states.identity import bind_for, bind_states, capture_identity, force_is_due
from aerie.hidden_states.last_slot import measure_last_slot, spaced_rows
from aerie.hidden_states.layers import CapturedLayers, resolve_layers
from aerie.hidden_states.parity import is_compared, parity_of_rows
from aerie.hidden_states.proof import prove
from aerie.hidden_states.record import CaptureProgress
from aerie.hidden_states.shards import iterate_own, merged, rows_of_rank
from aerie.hidden_states.streaming import window_bytes
from aerie.stages import Events, StageRequest, StageResult


def forecast(request: StageRequest, events: Events) -> StageResult:
    """Forecast the bytes of the corpus' hidden states against the disk; always anew, because disks fill.

    Some rows are judged once more: capture is not paid for, nor approved, for a corpus that training would refuse.

    Raises:
        BadInput: they are to be streamed, and the limit cannot hold what two training steps read; or a file that tells
            of a data set's tokens is missing.
        Failed: they do not fit; the message holds the sum. Or rows break the boundary of prompt and response.
    """
    corpus, inputs = read_corpus(request.files)
    boundaries = require_sound_rows(request.files, request.settings)
    events.progress(f"{boundaries.rows} rows of the corpus, judged once more, stand at their boundary")
    layers = resolve_layers(request.settings)
    predicted = _forecast(request, corpus, layers)
    events.progress(f"hidden states: {predicted.sum}", bytes=predicted.total_bytes)
    require_fit(predicted)
    counts = {
        "tokens": predicted.tokens,
        "bytes_per_token": predicted.bytes_per_token,
        "bytes": predicted.total_bytes,
        "present_bytes": predicted.present_bytes,
        "discarded_bytes": predicted.discarded_bytes,
        "free_bytes": predicted.free_bytes,
        "spared_bytes": predicted.spared_bytes,
        "window_bytes": predicted.window_bytes,
        "captured_tokens": predicted.captured_tokens,
        "missing_tokens": predicted.missing_tokens,
        "tokens_per_second": predicted.rate.tokens_per_second if predicted.rate else None,
        "rate_source": predicted.rate.source if predicted.rate else None,
        "hours": predicted.hours,
        "backend": request.settings.hidden_states.backend,
        "folder": str(predicted.folder),
        "layers": list(layers.auxiliary),
        "corpus_fingerprint": corpus.counts["corpus_fingerprint"],
        "boundaries": boundaries.counts,
    }
    manifest = write_manifest(
        request.files.manifest("forecast"),
        stage="forecast",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint_of({"layers": vars(layers), "free_share": request.settings.hidden_states.free_share}),
        inputs=inputs,
        outputs=[],
        counts=counts,
    )
    return StageResult(stage="forecast", reused=False, manifest=manifest, data={"sum": predicted.sum})


def _forecast(request: StageRequest, corpus: Manifest, layers: CapturedLayers) -> Forecast:
    files, settings = request.files, request.settings
    tokens = corpus.counts["tokens"]
    due = force_is_due(request)
    return forecast_disk(
        tokens=tokens,
        layers=layers,
        folder=files.hidden_states,
        present_bytes=0 if due else present_tokens(files.states, _samples(files)) * layers.bytes_per_token,
        discarded_bytes=folder_bytes(files.states) if due else 0,
        free_share=settings.hidden_states.free_share,
        window_bytes=window_bytes(settings, layers, tokens=tokens, rows=corpus.counts["rows"]),
        epochs=settings.training.epochs,
        rate=capture_rate(request),
    )


def capture_rate(request: StageRequest) -> CaptureRate | None:
    """What the edition's latest capture with this back end measured, else what the configuration expects."""
    measured = _measured_rate(request)
    if measured is not None:
        return CaptureRate(measured, "measured by this edition's latest capture")
    expected = request.settings.expected_rates.capture_tokens_per_second
    return None if expected is None else CaptureRate(expected, EXPECTED)


def _measured_rate(request: StageRequest) -> float | None:
    path = request.files.manifest("capture")
    if not path.exists():
        return None
    counts = read_manifest(path).counts
    if counts.get("backend") != request.settings.hidden_states.backend:  # nor have manifests of before any
        return None
    rate: float | None = counts.get("tokens_per_second")
    return rate


def _samples(files: EditionFiles) -> Iterator[tuple[str, int]]:
    """Id and tokens of each row."""
    for batch in iterate_batches(files.corpus / DATASET_FOLDER):
        yield from zip(batch["sample_id"].to_pylist(), batch["seq_len"].to_pylist(), strict=True)


def capture(request: StageRequest, events: Events) -> StageResult:
    """Capture the hidden states of every corpus row, check each, and link them by row.

    State files that are there and good are kept; what is missing or wrong is captured. A forced capture discards all
    that no capture of its run has made, what was taken while generating too. A rank captures its own rows
    and leaves their index; without a rank, the indexes of all are taken together. For a corpus that
    exceeds ``hidden_states.disk_limit_gib`` the capture is proved on a sample (``aerie.hidden_states.proof``).

    Raises:
        BadInput: there is no forecast for this corpus and these layers, a row is longer than the server's context, or
            a rank has not captured.
        Failed: they do not fit the disk, belong to another verifier or other layers, or differ from transformers.
        Retryable: the server stopped answering.
    """
    files = request.files
    corpus, inputs = read_corpus(files)
    layers = resolve_layers(request.settings)
    _require_forecast(request, corpus, layers)
    window = window_bytes(request.settings, layers, tokens=corpus.counts["tokens"], rows=corpus.counts["rows"])
    if window is not None:
        if request.settings.hidden_states.rank is not None:
            raise BadInput(
                "hidden_states.rank is set, but the states of this corpus exceed hidden_states.disk_limit_gib and are "
                "streamed while training: no rank captures a part of them; leave one of the two out"
            )
        _require_context(request, corpus)
        require_fit(_forecast(request, corpus, layers))
        return prove(request, corpus, inputs, layers, events, limit_bytes=window)
    identity = capture_identity(request, layers)
    fingerprint = fingerprint_of({"corpus": corpus.counts["corpus_fingerprint"], **identity})
    if request.settings.hidden_states.rank is not None:
        return _capture_rank(request, request.settings.hidden_states.rank, corpus, layers, identity, events)
    manifest_path = files.manifest("capture")
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None and not _changed_states(files):
        if not is_compared(answer, rows=request.settings.hidden_states.parity_rows):
            return _compare(request, answer, layers, events)
        events.progress(f"nothing to do: the states of {answer.counts['files']} rows answer this corpus")
        return StageResult(stage="capture", reused=True, manifest=answer)
    _require_context(request, corpus)
    measured_before = _measured_rate(request)
    manifest_path.unlink(missing_ok=True)
    if bind_for(request, identity):
        events.progress("states that were there are discarded: --force")
    require_fit(_forecast(request, corpus, layers))
    captured = _captured(request, corpus, layers, events)
    parity = parity_of_rows(iterate_rows(files.corpus / DATASET_FOLDER), files.states, layers, request.settings, events)
    link_rows(files.hidden_states, files.states, [state_name(state.sample_id) for state in captured.states])
    last_slot = measure_last_slot(
        spaced_rows(files, len(captured.states)),
        lambda row: link_path(files.hidden_states, row.row),
        request.settings.verifier.path,
    )
    if last_slot.problem is not None:
        events.alert("wrong_states", f"{files.hidden_states}: {last_slot.problem}; training will refuse them")
    index = files.hidden_states / INDEX_FILE
    write_index(index, captured.states)
    counts: dict[str, Any] = {
        "files": len(captured.states),
        "bytes": sum(state.bytes for state in captured.states),
        "tokens": sum(state.tokens for state in captured.states),
        "layers": list(layers.auxiliary),
        "slots": layers.slots,
        "hidden_size": layers.hidden_size,
        "dtype": layers.dtype,
        "corpus_fingerprint": corpus.counts["corpus_fingerprint"],
        "backend": request.settings.hidden_states.backend,
        "captured_tokens": captured.progress.captured_tokens,
        "tokens_per_second": captured.progress.tokens_per_second or measured_before,
        "storage": layers.storage,
        "fp8_errors": fp8_errors(files, captured.states) if layers.storage == "fp8" else None,
        "parity": vars(parity) if parity else None,
        "last_slot": vars(last_slot),
    }
    manifest = write_manifest(
        manifest_path,
        stage="capture",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(index, len(captured.states))],
        counts=counts,
    )
    return StageResult(stage="capture", reused=False, manifest=manifest)


def _compare(request: StageRequest, answer: Manifest, layers: CapturedLayers, events: Events) -> StageResult:
    """Compare a capture that stands with transformers in more rows than it was, and record it."""
    files = request.files
    manifest_path, rows = files.manifest("capture"), iterate_rows(files.corpus / DATASET_FOLDER)
    try:
        parity = parity_of_rows(rows, files.states, layers, request.settings, events)
    except Failed:
        manifest_path.unlink()  # nobody trains on it
        raise
    manifest = write_manifest(
        manifest_path,
        stage=answer.stage,
        edition=answer.edition,
        dataset=answer.dataset,
        fingerprint=answer.fingerprint,
        inputs=answer.inputs,
        outputs=answer.outputs,
        counts={**answer.counts, "parity": vars(parity) if parity else None},
    )
    return StageResult(stage="capture", reused=False, manifest=manifest)


def _captured(request: StageRequest, corpus: Manifest, layers: CapturedLayers, events: Events) -> CapturedRows:
    """The states of every row: captured here, or by the ranks."""
    files, rows, world_size = request.files, corpus.counts["rows"], request.settings.hidden_states.world_size
    if world_size == 1:
        return capture_rows(request, layers, events, lambda: iterate_rows(files.corpus / DATASET_FOLDER), count=rows)
    states = merged(files, world_size=world_size, rows=rows)
    require_magnitudes(states)
    events.progress(f"took the files of {world_size} ranks together: {rows} rows, each once")
    return CapturedRows(states, CaptureProgress(present_rows=rows))


def _capture_rank(
    request: StageRequest, rank: int, corpus: Manifest, layers: CapturedLayers, identity: dict[str, Any], events: Events
) -> StageResult:
    """Capture the rows of one rank, and write their index; other ranks may do so at the same time.

    Raises:
        BadInput: it is forced, which would take away what other ranks capture.
    """
    files, world_size = request.files, request.settings.hidden_states.world_size
    if request.force:
        raise BadInput(
            f"capture --rank {rank} --force would discard what the other ranks capture into {files.hidden_states}: run "
            f"capture --world-size {world_size} --force once, which discards all states and says that no rank has "
            "captured, then each rank without --force"
        )
    _require_context(request, corpus)
    bind_states(files, identity, discard=False)
    require_fit(_forecast(request, corpus, layers))
    own = rows_of_rank(corpus.counts["rows"], rank=rank, world_size=world_size)
    captured = capture_rows(request, layers, events, lambda: iterate_own(files, own), count=len(own))
    parity_of_rows(iterate_own(files, own), files.states, layers, request.settings, events)
    write_shard_index(shard_index(files.hidden_states, rank, world_size), captured.states)
    events.progress(f"rank {rank} of {world_size} has the states of its {len(own)} rows")
    figures = {"rank": rank, "world_size": world_size, "rows": len(own)}
    return StageResult(stage="capture", reused=False, data=figures)


def _changed_states(files: EditionFiles) -> bool:
    """Whether a state file is missing, has another size than the index says, or is not what its row's link names."""
    for state in iterate_index(files.hidden_states / INDEX_FILE):
        path, link = files.hidden_states / state.file, link_path(files.hidden_states, state.row)
        if not path.is_file() or path.stat().st_size != state.bytes:
            return True
        if not link.is_symlink() or link.readlink() != Path(state.file):
            return True
    return False


def fp8_errors(files: EditionFiles, states: Iterable[IndexedState]) -> dict[str, Any] | None:
    """Mean and largest relative error by slot [L] of the ``files`` that say what they lost, None where none does."""
    read = (read_fp8_error(files.hidden_states / state.file) for state in states)
    errors = [error for error in read if error is not None]
    if not errors:
        return None
    by_slot = list(zip(*errors, strict=True))
    return {
        "files": len(errors),
        "mean": [sum(slot) / len(slot) for slot in by_slot],
        "maximum": [max(slot) for slot in by_slot],
    }


def _require_forecast(request: StageRequest, corpus: Manifest, layers: CapturedLayers) -> None:
    """The forecast judged the corpus, and the server was launched with its layers: both must still be right."""
    path = request.files.manifest("forecast")
    counts, fingerprint = read_manifest(path).counts, corpus.counts["corpus_fingerprint"]
    made_for = counts.get("corpus_fingerprint", "")  # forecasts of before have none, and judged no rows
    if made_for != fingerprint:
        raise BadInput(
            f"{path}: the forecast was made for corpus {made_for[:12] or 'of before'}, but the corpus is "
            f"{fingerprint[:12]}: its rows are judged there before they are captured; run forecast again"
        )
    forecast_layers = counts["layers"]
    if forecast_layers != list(layers.auxiliary):
        raise BadInput(
            f"the forecast was made for layers {forecast_layers}, but the settings now ask for "
            f"{list(layers.auxiliary)}; run forecast again and restart the server"
        )


def _require_context(request: StageRequest, corpus: Manifest) -> None:
    if request.settings.hidden_states.backend == "transformers":
        return
    longest, context = corpus.counts["longest_row_tokens"], request.settings.serving.context_length
    if longest >= context:
        raise BadInput(
            f"the longest corpus row has {longest} tokens, but serving.context_length is {context} and one "
            "token more is sampled: raise it, or lower corpus.maximum_length and merge again"
        )
