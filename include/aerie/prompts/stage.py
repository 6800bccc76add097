"""Stages ``prepare`` (conversations become prompt ids) and ``import`` (tokenised rows are checked and taken over)."""

import hashlib
from collections.abc import Iterator
from typing import Any, TypeVar

from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.imported import write_imported
from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.manifest import InputFile, answered_by, describe_input, describe_output, write_manifest
from aerie.artefacts.prompts import write_prompts
from aerie.artefacts.verifier_tokens import write_verifier_tokens
from aerie.errors import BadInput
from aerie.prompts.candidates import open_candidates
from aerie.prompts.checkpoint import Verifier, load_verifier
from aerie.prompts.importing import Importer
from aerie.prompts.preparing import Renderer, collect
from aerie.prompts.rendering import probe
from aerie.prompts.sidecar import read_sidecar, sidecar_path
from aerie.prompts.tally import Progress, Tally
from aerie.settings.pipeline import DatasetSettings, SourceSettings
from aerie.sources.readers import TOKENISED, reader_of
from aerie.sources.rows import iterate_source, source_files
from aerie.stages import Events, StageRequest, StageResult

# Raised when these stages make something else of the same input, so that an older manifest no longer answers.
VERSION = 2

Row = TypeVar("Row")


def prepare(request: StageRequest, events: Events) -> StageResult:
    """Write ``prompts.parquet`` and ``verifier.json`` of a generated data set.

    Prompts are rendered by the verifier's own chat template and lie in the order of ``admission_rank``; those that
    cannot be generated (too long, rejected by the template) are there with a ``skip_reason``.

    Raises:
        BadInput: the settings, the checkpoint or the source are wrong, or too much of the source cannot be used.
        Retryable: the hub could not be reached.
    """
    dataset = _dataset(request, "generated")
    source, settings = dataset.source, request.settings
    reader = reader_of(source)
    verifier = load_verifier(settings.verifier)
    maximum_tokens = settings.serving.context_length - dataset.minimum_new_tokens
    fingerprint = fingerprint_of(
        {
            **_origin(request, source),
            "seed": settings.seed,
            "maximum_prompt_tokens": maximum_tokens,
            "verifier": _rendering_identity(verifier),
        }
    )
    inputs = source_inputs(source)
    files = request.files.dataset(str(request.dataset))
    if reused := _answered(request, events, "prepare", files, fingerprint, inputs):
        return reused
    if maximum_tokens < 1:
        raise BadInput(
            f"context_length {settings.serving.context_length} leaves no room for a prompt beside minimum_new_tokens "
            f"{dataset.minimum_new_tokens}"
        )
    probe(verifier)
    progress = Progress(events)
    with open_candidates(files.folder / ".candidates.sqlite") as candidates:
        read = collect(iterate_source(source), reader, candidates, seed=settings.seed, progress=progress)
        events.progress(f"{request.dataset}: read {read.rows} rows: {candidates.added} prompts; {read.describe()}")
        read.check(_name_of(source), source.max_skipped_share)
        if not candidates.added:
            raise BadInput(f"{_name_of(source)}: no prompt in {read.rows} rows; set aside: {dict(read.set_aside)}")
        renderer = Renderer(
            verifier=verifier,
            dataset=str(request.dataset),
            seed=settings.seed,
            splits=settings.splits,
            maximum_tokens=maximum_tokens,
            progress=progress,
        )
        written = write_prompts(files.prompts, _checked(renderer.prompts(candidates), renderer.tally, source))
    write_verifier_tokens(files.verifier_tokens, verifier.tokens)
    events.progress(
        f"{request.dataset}: {renderer.usable} prompts, {renderer.prompt_tokens} tokens, "
        f"{renderer.duplicates} duplicates; {renderer.tally.describe()}",
        **renderer.figures,
    )
    manifest = write_manifest(
        files.manifest("prepare"),
        stage="prepare",
        edition=request.edition,
        dataset=request.dataset,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(files.prompts, written), describe_output(files.verifier_tokens)],
        counts={
            "rows": read.rows,
            "prompts": renderer.usable,
            "prompts_by_split": dict(renderer.split_counts),
            "prompt_tokens": renderer.prompt_tokens,
            "longest_prompt_tokens": renderer.longest_prompt_tokens,
            "skipped": dict((read.skipped + renderer.tally.skipped).most_common()),
            "skipped_examples": read.examples | renderer.tally.examples,
            "set_aside": dict(read.set_aside) | {"duplicate": renderer.duplicates},
            "repairs": dict(read.repairs.most_common()),
        },
    )
    return StageResult(stage="prepare", reused=False, manifest=manifest)


def import_tokenised(request: StageRequest, events: Events) -> StageResult:
    """Write ``imported.parquet`` and ``verifier.json`` of a data set that arrives tokenised.

    Raises:
        BadInput: the settings, the checkpoint, the sidecar or the source are wrong, or too many rows are.
        Retryable: the hub could not be reached.
    """
    dataset = _dataset(request, "tokenised")
    source = dataset.source
    if source.reader != TOKENISED:
        raise BadInput(
            f"data set {request.dataset} of kind 'tokenised': expected reader {TOKENISED!r}, found {source.reader!r}"
        )
    verifier = load_verifier(request.settings.verifier)
    sidecar = read_sidecar(source, verifier.tokens)
    provenance: Any = sidecar.model_dump() if sidecar else "unknown"
    fingerprint = fingerprint_of(
        {
            **_origin(request, source),
            "provenance": provenance,
            "tokenizer_sha256": verifier.tokens.tokenizer_sha256,
            "vocabulary_size": verifier.tokens.vocabulary_size,
        }
    )
    inputs = source_inputs(source) + ([describe_input(sidecar_path(source))] if sidecar else [])
    files = request.files.dataset(str(request.dataset))
    if reused := _answered(request, events, "import", files, fingerprint, inputs):
        return reused
    if sidecar is None:
        events.alert("unknown_provenance", f"{request.dataset}: {_name_of(source)} has no sidecar; taken as it is")
    elif sidecar.thinking != request.settings.verifier.thinking:
        events.alert(
            "thinking_differs",
            f"{request.dataset}: thinking is {sidecar.thinking} in {sidecar_path(source)}, but "
            f"{request.settings.verifier.thinking} in verifier.thinking",
        )
    importer = Importer(
        source=source,
        dataset=str(request.dataset),
        vocabulary_size=verifier.tokens.vocabulary_size,
        splits=request.settings.splits,
        progress=Progress(events),
    )
    written = write_imported(files.imported, _checked(importer.rows(), importer.tally, source))
    write_verifier_tokens(files.verifier_tokens, verifier.tokens)
    events.progress(
        f"{request.dataset}: {written} rows, {importer.tokens} tokens, {importer.duplicates} duplicates; "
        f"{importer.tally.describe()}",
        **importer.figures,
    )
    manifest = write_manifest(
        files.manifest("import"),
        stage="import",
        edition=request.edition,
        dataset=request.dataset,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(files.imported, written), describe_output(files.verifier_tokens)],
        counts={
            "rows": importer.tally.rows,
            "imported": written,
            "imported_by_split": dict(importer.split_counts),
            "tokens": importer.tokens,
            "trained_tokens": importer.trained_tokens,
            "skipped": dict(importer.tally.skipped.most_common()),
            "skipped_examples": importer.tally.examples,
            "set_aside": {"duplicate": importer.duplicates},
            "provenance": provenance,
        },
    )
    return StageResult(stage="import", reused=False, manifest=manifest)


def _checked(rows: Iterator[Row], tally: Tally, source: SourceSettings) -> Iterator[Row]:
    """The rows, and an error in place of their end, so that no file appears, where too many were refused."""
    taken = False
    for row in rows:
        yield row
        taken = True
    tally.check(_name_of(source), source.max_skipped_share)
    if not taken:
        raise BadInput(f"{_name_of(source)}: nothing to take from {tally.rows} rows")


def source_inputs(source: SourceSettings) -> list[InputFile]:
    """What is read: local files by their bytes, a Hugging Face data set by its pinned revision and selection."""
    if source.path is not None:
        return [describe_input(path) for path in source_files(source)]
    selection = source.model_dump(include={"config", "split", "data_files", "revision"})
    uri = f"hf://datasets/{source.huggingface}@{source.revision}"
    return [InputFile(uri=uri, sha256=fingerprint_of({"huggingface": source.huggingface, **selection}))]


def _dataset(request: StageRequest, kind: str) -> DatasetSettings:
    dataset = request.dataset_settings
    if dataset.kind != kind:
        stage = "import" if dataset.kind == "tokenised" else "prepare"
        raise BadInput(f"data set {request.dataset} is of kind {dataset.kind!r}: its stage is {stage}")
    return dataset


def _name_of(source: SourceSettings) -> str:
    return str(source.path or f"{source.huggingface}@{source.revision}")


def _origin(request: StageRequest, source: SourceSettings) -> dict[str, Any]:
    """What both stages' fingerprints share."""
    return {
        "version": VERSION,
        "dataset": request.dataset,
        **source.model_dump(mode="json", include={"reader", "columns", "where"}),
        "splits": request.settings.splits.model_dump(),
    }


def _rendering_identity(verifier: Verifier) -> dict[str, Any]:
    return {
        "model_type": verifier.tokens.model_type,
        "tokenizer_sha256": verifier.tokens.tokenizer_sha256,
        "token_ids": dict(verifier.tokens.token_ids),
        "template_sha256": hashlib.sha256(verifier.template.encode()).hexdigest(),
        "switches": dict(verifier.switches),
        "tail": list(verifier.tail),
        "control_texts": verifier.control_texts.pattern,
    }


def _answered(
    request: StageRequest,
    events: Events,
    stage: str,
    files: DatasetFiles,
    fingerprint: str,
    inputs: list[InputFile],
) -> StageResult | None:
    """The earlier result, where a manifest answers the request already."""
    manifest = answered_by(files.manifest(stage), fingerprint=fingerprint, inputs=inputs)
    if manifest is None or request.force:
        return None
    events.progress(f"nothing to do: {request.dataset} was done before from the same input ({files.manifest(stage)})")
    return StageResult(stage=stage, reused=True, manifest=manifest)
