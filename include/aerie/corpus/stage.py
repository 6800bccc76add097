"""The stages ``merge`` and ``vocabulary``."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from aerie.artefacts.corpus import (
    DATASET_FOLDER,
    INFO_FILE,
    STATE_FILE,
    TOKEN_COUNTS_FILE,
    TOKEN_FREQUENCIES_FILE,
    read_token_counts,
    write_token_frequencies,
)
from aerie.artefacts.draft_vocabulary import write_draft_vocabulary
from aerie.artefacts.dropped_rows import DROPPED_FILE, write_dropped_rows
from aerie.artefacts.files import atomic_folder, fingerprint_of, remove_partial_folders
from aerie.artefacts.layout import CORPUS_REPORT, EditionFiles
from aerie.artefacts.manifest import (
    InputFile,
    Manifest,
    answered_by,
    describe_input,
    describe_output,
    path_of,
    read_manifest,
    write_manifest,
)
from aerie.artefacts.verifier_tokens import VerifierTokens, read_verifier_tokens
from aerie.corpus.limits import caps_of
from aerie.corpus.merge import Merge, Merged, Prepared, Rules, Source
from aerie.corpus.progress import Progress
from aerie.corpus.report import render_report
from aerie.corpus.selection import KEPT, REASONS, Selection
from aerie.corpus.vocabulary import (
    Coverage,
    CoverageCurve,
    as_arrays,
    choose,
    forced_tokens,
    require_coverage,
    size_asked_for,
    usual_sizes,
)
from aerie.errors import Failed
from aerie.stages import Events, StageRequest, StageResult

MERGE_VERSION = 4
"""Raised when the same samples would become another corpus."""
VOCABULARY_VERSION = 2
"""Raised when the same corpus would get another draft vocabulary."""


def merge(request: StageRequest, events: Events) -> StageResult:
    """Merge every validated data set of the edition into one shuffled training set, with its token frequencies.

    Raises:
        Failed: a data set that ``corpus.require`` asks for is not validated, samples changed after validation, or a row
            is wrong.
    """
    files = request.files
    sources = validated_sources(request)
    verifier = shared_verifier(files, sources)
    inputs = [_unchanged_samples(files, source) for source in sources]
    inputs += [describe_input(source.prompt_hashes) for source in sources if source.prompt_hashes.is_file()]
    prepared = prepared_beside(request, sources)
    inputs += map(describe_input, prepared.files)
    rules = Rules(
        seed=request.settings.seed,
        maximum_length=request.settings.corpus.maximum_length,
        vocabulary_size=verifier.vocabulary_size,
        caps=caps_of(request.settings),
        weights=dict(request.settings.corpus.weights),
    )
    datasets = [source.dataset for source in sources]
    fingerprint = fingerprint_of({"version": MERGE_VERSION, "datasets": datasets, **asdict(rules)})
    manifest_path = files.manifest("merge")
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None:
        events.progress(f"nothing to do: the corpus of {answer.counts['rows']} rows answers these samples")
        return StageResult(stage="merge", reused=True, manifest=answer)
    manifest_path.unlink(missing_ok=True)
    events.progress(f"merging {len(datasets)} data sets: {', '.join(datasets)}")
    remove_partial_folders(files.corpus)
    progress = Progress(events, request.settings.generation.progress_seconds)
    with atomic_folder(files.corpus) as folder:
        merged = Merge(folder / DATASET_FOLDER, sources, rules, prepared, progress).run()
        counts = {**merged.counts, "seed": rules.seed}
        write_token_frequencies(folder, merged.frequencies)
        dropped_rows = _write_dropped(folder / DROPPED_FILE, sources, merged.selection)
        (folder / CORPUS_REPORT).write_text(_html(merged, counts, request), encoding="utf-8")
    dataset = files.corpus / DATASET_FOLDER
    shards = [describe_output(dataset / shard.name, shard.rows, shard.sha256) for shard in merged.shards]
    beside = [dataset / STATE_FILE, dataset / INFO_FILE]
    beside += [files.corpus / name for name in (TOKEN_FREQUENCIES_FILE, TOKEN_COUNTS_FILE, CORPUS_REPORT)]
    manifest = write_manifest(
        manifest_path,
        stage="merge",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[
            *shards,
            *map(describe_output, beside),
            describe_output(files.corpus / DROPPED_FILE, dropped_rows),
        ],
        counts=counts,
    )
    _tell(counts, files.corpus_report, events)
    return StageResult(stage="merge", reused=False, manifest=manifest)


def validated_sources(request: StageRequest) -> list[Source]:
    """Validated data sets of the edition, in the order of the settings, which is the pipeline's (``keys_in_order``).

    Under ``require: all`` every data set of the settings must be validated; a run that selected some must have those,
    and every other data set that the edition has begun.

    Raises:
        Failed: one that must be validated is not, or none is.
    """
    files, settings = request.files, request.settings
    validated = [key for key in settings.datasets if files.dataset(key).manifest("validate").is_file()]
    begun = [key for key in settings.datasets if files.dataset(key).folder.is_dir()]
    expected = {*request.selected, *begun} if request.selected else set(settings.datasets)
    missing = sorted(expected - set(validated))
    if missing and settings.corpus.require == "all":
        raise Failed(
            f"edition {request.edition}: not validated: {', '.join(missing)} (validated: "
            f"{', '.join(validated) or 'none'}); finish them, or set corpus.require to some"
        )
    if not validated:
        raise Failed(f"edition {request.edition}: no data set has been validated, there is nothing to merge")
    return [
        Source(
            dataset=key,
            samples=files.dataset(key).samples,
            prompt_hashes=files.dataset(key).prompt_hashes,
            tokenised=settings.dataset(key).kind == "tokenised",
        )
        for key in validated
    ]


def prepared_beside(request: StageRequest, sources: list[Source]) -> Prepared:
    """What is prepared of generated data sets, validated or not: their prompts, if there are rows to compare by ids."""
    merged = {source.dataset for source in sources}
    generated = [key for key, dataset in request.settings.datasets.items() if dataset.kind == "generated"]
    files = {key: request.files.dataset(key) for key in generated}
    prompts = [its.prompts for key, its in files.items() if key in merged or its.prompts.is_file()]
    return Prepared(
        prompts=prompts if any(source.tokenised for source in sources) else (),
        prompt_hashes=[
            its.prompt_hashes for key, its in files.items() if key not in merged and its.prompt_hashes.is_file()
        ],
    )


def shared_verifier(files: EditionFiles, sources: list[Source]) -> VerifierTokens:
    """The verifier's tokens, which all data sets must have been prepared with.

    Raises:
        Failed: two data sets were prepared with different tokenizers.
    """
    tokens = {s.dataset: read_verifier_tokens(files.dataset(s.dataset).verifier_tokens) for s in sources}
    first, *others = tokens
    for dataset in others:
        if tokens[dataset].tokenizer_sha256 != tokens[first].tokenizer_sha256:
            raise Failed(
                f"data sets {first} and {dataset} were prepared with different tokenizers "
                f"({tokens[first].tokenizer_sha256[:12]}, {tokens[dataset].tokenizer_sha256[:12]}): ids cannot be "
                "merged; prepare both with the same verifier"
            )
    return tokens[first]


def _unchanged_samples(files: EditionFiles, source: Source) -> InputFile:
    described = describe_input(source.samples)
    manifest = read_manifest(files.dataset(source.dataset).manifest("validate"))
    recorded = {path_of(output.uri).name: output.sha256 for output in manifest.outputs}
    if recorded.get(source.samples.name) != described.sha256:
        raise Failed(f"{source.samples} changed after it was validated; validate data set {source.dataset} again")
    return described


def _write_dropped(path: Path, sources: list[Source], selection: Selection) -> int:
    dropped = np.flatnonzero(selection.reasons != KEPT)
    return write_dropped_rows(
        path,
        keys=selection.rows.keys[dropped],
        datasets=[sources[number].dataset for number in selection.rows.datasets[dropped]],
        reasons=[REASONS[reason] for reason in selection.reasons[dropped]],
        same_as=selection.same_as[dropped],
    )


def _html(merged: Merged, counts: Mapping[str, Any], request: StageRequest) -> str:
    return render_report(
        edition=request.edition,
        counts=counts,
        statistics=merged.datasets,
        frequencies=merged.frequencies,
        budgets={name: dataset.budget_tokens for name, dataset in request.settings.datasets.items()},
    )


def _tell(counts: Mapping[str, Any], report: Path, events: Events) -> None:
    events.progress(
        f"corpus of {counts['rows']} rows ({counts['train_rows']} train, {counts['validation_rows']} validation), "
        f"{counts['tokens']} tokens, {counts['response_tokens']} of responses; dropped {counts['dropped']}; "
        f"see {report}"
    )
    for dataset, kept in counts["datasets"].items():
        events.metric(dataset=dataset, corpus_rows=kept["rows"], corpus_tokens=kept["tokens"])


def read_corpus(files: EditionFiles) -> tuple[Manifest, list[InputFile]]:
    """The manifest of the merged corpus, and its files as inputs of a later stage.

    Raises:
        BadInput: there is no corpus.
        Failed: a file of it changed after it was merged.
    """
    manifest = read_manifest(files.manifest("merge"))
    inputs = [describe_input(path_of(output.uri)) for output in manifest.outputs]
    for described, output in zip(inputs, manifest.outputs, strict=True):
        if described.sha256 != output.sha256:
            raise Failed(f"{path_of(output.uri)} changed after it was merged; run merge again with --force")
    return manifest, inputs


def vocabulary(request: StageRequest, events: Events) -> StageResult:
    """Choose the draft vocabulary from the corpus' response tokens and measure what it covers.

    Raises:
        BadInput: the size asked for is impossible, or a forced token does not exist.
        Failed: coverage is below ``vocabulary.minimum_coverage``.
    """
    files, asked = request.files, request.settings.vocabulary
    corpus, inputs = read_corpus(files)
    dataset = next(iter(corpus.counts["datasets"]))
    verifier = read_verifier_tokens(files.dataset(dataset).verifier_tokens)
    forced = forced_tokens(request.settings.verifier.load_profile(), verifier)
    corpus_fingerprint = corpus.counts["corpus_fingerprint"]
    fingerprint = fingerprint_of(
        {
            "version": VOCABULARY_VERSION,
            "settings": asked.model_dump(),
            "forced": forced,
            "vocabulary_size": verifier.vocabulary_size,
        }
    )
    manifest_path = files.manifest("vocabulary")
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None:
        events.progress(f"nothing to do: the draft vocabulary of {answer.counts['size']} tokens answers this corpus")
        return StageResult(stage="vocabulary", reused=True, manifest=answer)
    manifest_path.unlink(missing_ok=True)
    counts = read_token_counts(files.corpus)
    curve = CoverageCurve.of(as_arrays(counts, verifier.vocabulary_size), list(forced.values()))
    chosen = choose(
        counts,
        size=size_asked_for(asked, curve, verifier.vocabulary_size),
        forced=list(forced.values()),
        vocabulary_size=verifier.vocabulary_size,
        corpus_fingerprint=corpus_fingerprint,
    )
    coverage = curve.at(chosen.size)
    by_size = curve.shares(usual_sizes(verifier.vocabulary_size))
    _report_coverage(by_size, coverage, chosen.size, events)
    require_coverage(coverage, minimum=asked.minimum_coverage, size=chosen.size)
    about = {
        "forced": forced,
        "coverage": coverage.overall,
        "coverage_by_dataset": dict(coverage.datasets),
        "coverage_by_size": by_size,
    }
    paths = write_draft_vocabulary(files.vocabulary, chosen, about)
    distinct = corpus.counts["distinct_tokens"]
    manifest = write_manifest(
        manifest_path,
        stage="vocabulary",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(path) for path in paths],
        counts={
            "corpus_fingerprint": corpus_fingerprint,
            "size": chosen.size,
            "distinct_tokens": distinct,
            "never_seen_tokens": max(0, chosen.size - distinct),
            **about,
        },
    )
    events.metric(vocabulary_size=chosen.size, vocabulary_coverage=coverage.overall)
    return StageResult(stage="vocabulary", reused=False, manifest=manifest)


def _report_coverage(by_size: list[dict[str, Any]], coverage: Coverage, size: int, events: Events) -> None:
    """Say what the chosen size covers; below it, folded in a log, what others would."""
    events.progress(
        f"draft vocabulary of {size} tokens covers {coverage.overall:.2%} of {coverage.response_tokens} response tokens"
    )
    events.block(
        "response tokens that other sizes cover, over all and by data set",
        (
            f"{one['size']:>7}: {one['coverage']:.2%}  "
            + ", ".join(f"{name} {share:.2%}" for name, share in one["datasets"].items())
            for one in by_size
        ),
    )
