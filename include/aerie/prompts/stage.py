"""Stages ``prepare`` (conversations become prompt ids) and ``import`` (tokenised rows are checked and taken over)."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aerie.artefacts.files import fingerprint_of, write_json
from aerie.artefacts.imported import write_imported
from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.manifest import InputFile, answered_by, describe_input, describe_output, write_manifest
from aerie.artefacts.prompt_hashes import PromptHashWriter, prompt_hash_writer
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.verifier_tokens import write_verifier_tokens
from aerie.errors import BadInput
from aerie.prompts.candidates import PART_CANDIDATES, Candidates, new_candidates
from aerie.prompts.checkpoint import Verifier, load_verifier
from aerie.prompts.decontamination import NamedPrompts
from aerie.prompts.importing import Importer
from aerie.prompts.parts import PartRenderer, Work, iterate_parts, write_parts
from aerie.prompts.preparing import Selection, collect
from aerie.prompts.rendering import Fit, Renderer
from aerie.prompts.sidecar import read_sidecar, sidecar_path
from aerie.prompts.tally import Progress, Tally
from aerie.settings.pipeline import DatasetSettings, SourceSettings, VerifierSettings
from aerie.sources.readers import TOKENISED, reader_of
from aerie.sources.rows import iterate_source, source_files
from aerie.stages import Events, StageRequest, StageResult

# Raised when these stages make something else of the same input, so that an older manifest no longer answers.
VERSION = 2

WORK_FOLDER = ".prepare"

Row = TypeVar("Row")


def prepare(request: StageRequest, events: Events) -> StageResult:
    """Write ``prompts.parquet``, ``prompt_hashes.parquet`` and ``verifier.json`` of a generated data set.

    Prompts are rendered by the verifier's own chat template and lie in the order of ``admission_rank``; those that
    cannot be generated (too long, rejected by the template) or may not (contaminated) are there with a
    ``skip_reason``. A run that was interrupted goes on where it was: the candidates and the parts that were rendered
    stay in a folder of their own until the manifest is written.

    Raises:
        BadInput: the settings, the checkpoint or the source are wrong, or too much of the source cannot be used.
        Retryable: the hub could not be reached.
    """
    dataset = _dataset(request, "generated")
    source, settings = dataset.source, request.settings
    reader = reader_of(source)
    verifier = load_verifier(settings.verifier)
    fit = Fit(settings.serving.context_length - dataset.minimum_new_tokens, source.turns, settings.seed)
    fingerprint = fingerprint_of(
        {**_origin(request, source), "fit": vars(fit), "verifier": _rendering_identity(verifier, settings.verifier)}
    )
    inputs = [*source_inputs(source), *map(_named_prompts, settings.decontaminate)]
    files = request.files.dataset(str(request.dataset))
    if reused := _answered(request, events, "prepare", files, fingerprint, inputs):
        return reused
    if fit.maximum_tokens < 1:
        raise BadInput(
            f"context_length {settings.serving.context_length} leaves no room for a prompt beside minimum_new_tokens "
            f"{dataset.minimum_new_tokens}"
        )
    renderer, named = Renderer(verifier, settings.verifier.prompt_date), NamedPrompts(settings.decontaminate)
    progress = Progress(events)
    folder = begun_work(files.folder / WORK_FOLDER, [fingerprint, *(described.sha256 for described in inputs)])
    work = Work(folder / "candidates.sqlite", folder, settings.verifier, settings.decontaminate, fit)
    read, count = _collected(
        work,
        lambda candidates: collect(
            iterate_source(source), reader, candidates, turns=source.turns, seed=settings.seed, progress=progress
        ),
    )
    events.progress(f"{request.dataset}: read {read.rows} rows: {count} prompts; {read.describe()}")
    read.check(_name_of(source), source.max_skipped_share)
    if not count:
        raise BadInput(f"{_name_of(source)}: no prompt in {read.rows} rows; set aside: {dict(read.set_aside)}")
    for done in write_parts(work, PartRenderer(work, renderer, named), count, workers=processors()):
        progress.tick(partial(_rendered, done, count))
    selection = Selection(str(request.dataset), settings.splits, progress)
    with prompt_hash_writer(files.prompt_hashes) as hashes:
        taken = _recorded(selection.prompts(iterate_parts(work, count)), hashes)
        written = write_prompts(files.prompts, _checked(taken, selection.tally, source))
    write_verifier_tokens(files.verifier_tokens, verifier.tokens)
    events.progress(
        f"{request.dataset}: {selection.usable} prompts, {selection.prompt_tokens} tokens, "
        f"{selection.duplicates} duplicates; {selection.tally.describe()}",
        **selection.figures,
    )
    manifest = write_manifest(
        files.manifest("prepare"),
        stage="prepare",
        edition=request.edition,
        dataset=request.dataset,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[
            describe_output(files.prompts, written),
            describe_output(files.prompt_hashes, written),
            describe_output(files.verifier_tokens),
        ],
        counts={
            "rows": read.rows,
            "prompts": selection.usable,
            "prompts_by_split": dict(selection.split_counts),
            "prompt_tokens": selection.prompt_tokens,
            "longest_prompt_tokens": selection.longest_prompt_tokens,
            "skipped": dict((read.skipped + selection.tally.skipped).most_common()),
            "skipped_examples": read.examples | selection.tally.examples,
            "set_aside": dict(read.set_aside + selection.tally.set_aside) | {"duplicate": selection.duplicates},
            "repairs": dict(read.repairs.most_common()),
        },
    )
    shutil.rmtree(folder)
    return StageResult(stage="prepare", reused=False, manifest=manifest)


def begun_work(folder: Path, identity: list[str]) -> Path:
    """The folder of unfinished work: as an interrupted run of the same ``identity`` left it, else empty."""
    mark = folder / "work.json"
    if not mark.is_file() or json.loads(mark.read_bytes()) != identity:
        shutil.rmtree(folder, ignore_errors=True)
        write_json(mark, identity)
    return folder


def _rendered(parts: int, count: int) -> tuple[str, dict[str, Any]]:
    rendered = min(parts * PART_CANDIDATES, count)
    return f"rendered {rendered} of {count} prompts", {"prompts": rendered}


def _collected(work: Work, collect_into: Callable[[Candidates], Tally]) -> tuple[Tally, int]:
    """What was read of the source, and how many candidates there are; read again only if that was not finished."""
    path = work.folder / "collected.json"
    if not path.is_file():
        with new_candidates(work.candidates) as candidates:
            tally = collect_into(candidates)
        write_json(path, {"tally": tally.as_document(), "candidates": candidates.added})
    document = json.loads(path.read_bytes())
    return Tally.of(document["tally"]), document["candidates"]


def _recorded(prompts: Iterator[tuple[Prompt, str]], hashes: PromptHashWriter) -> Iterator[Prompt]:
    """The prompts, each of them also written to the file of hashes."""
    for prompt, content in prompts:
        hashes.add(prompt.sample_id, prompt.split, content)
        yield prompt


def _named_prompts(path: Path) -> InputFile:
    if not path.is_file():
        raise BadInput(f"{path}: no such file (of 'decontaminate')")
    return describe_input(path)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


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
    inputs = [*source_inputs(source), *map(_named_prompts, request.settings.decontaminate)]
    inputs += [describe_input(sidecar_path(source))] if sidecar else []
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
        named=NamedPrompts(request.settings.decontaminate),
        decode=verifier.tokenizer.decode,
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
            "set_aside": dict(importer.tally.set_aside) | {"duplicate": importer.duplicates},
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


def _rendering_identity(verifier: Verifier, settings: VerifierSettings) -> dict[str, Any]:
    return {
        "prompt_date": str(settings.prompt_date),
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
