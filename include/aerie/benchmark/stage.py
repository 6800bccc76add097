"""The stage ``benchmark``: acceptance length and speed on held-out prompts, greedily, with and without the drafter."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.artefacts.draft_vocabulary import read_draft_vocabulary
from aerie.artefacts.files import fingerprint_of, write_json, write_text
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
from aerie.benchmark.measures import Circumstances, DatasetRun, Runs, Variant, require_gates, summarise
from aerie.benchmark.requests import Held, Load, held_out_prompts, measure
from aerie.benchmark.server import ServerFacts, benchmark_server, read_server_facts, require_drafter
from aerie.errors import Failed
from aerie.settings.pipeline import AROUND_THE_SERVER, BenchmarkSettings
from aerie.stages import Events, StageRequest, StageResult

BENCHMARK_VERSION = 1
"""Raised when the same server and prompts would be measured otherwise."""

UNTRAINED_SHARE = 4
UNTRAINED_NEW_TOKENS = 64
"""The untrained drafter makes every token slower and proves one number: it gets one prompt in four, cut short."""

RESULTS_FILE = "results.json"
DEFINITION = (
    "acceptance length = completion tokens / verify steps, summed over requests before dividing; the verifier's own "
    "token of each step is counted; greedy decoding"
)
SPEED_SETTINGS = ("max_new_tokens", "concurrency")
NOT_MEASURED = AROUND_THE_SERVER | {"host", "port"}
DRAFT_SETTINGS = ("num_steps", "eagle_topk", "num_draft_tokens")


class Measurement(BaseModel):
    """What one server was measured at; ``key`` says what it answers, so that a retry does not measure it again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    runs: Mapping[str, DatasetRun]
    server: ServerFacts


def benchmark(request: StageRequest, events: Events) -> StageResult:
    """Measure the exported drafter and judge it.

    Raises:
        BadInput: there is no export, or no held-out prompt.
        Failed: the drafter is below the threshold, or changes what the verifier says (the results are written first);
            a server runs other weights or settings than asked for.
        Retryable: a server went away.
    """
    files, asked = request.files, request.settings.benchmark
    exported = read_manifest(files.manifest("export"))
    held = held_out_prompts(request.settings, files)
    inputs = [*unchanged_drafter(exported), *(describe_input(files.dataset(one.dataset).prompts) for one in held)]
    fingerprint = fingerprint_of(
        {"version": BENCHMARK_VERSION, "settings": asked.model_dump(), "drafter": exported.fingerprint}
    )
    manifest_path, data = files.manifest("benchmark"), {"drafter_fingerprint": exported.fingerprint}
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None:
        events.progress(f"nothing to do: acceptance length {answer.counts['acceptance_length']:.2f} is of this drafter")
        return StageResult(stage="benchmark", reused=True, manifest=answer, data=data)
    manifest_path.unlink(missing_ok=True)
    measured = {variant: measure_variant(request, exported, variant, held, events) for variant in variants(asked)}
    results = write_results(request, exported, measured)
    report(results, events)
    require_gates(
        results,
        minimum_acceptance_length=asked.minimum_acceptance_length,
        exact=request.settings.verifier.dtype == "float32",
        circumstances=circumstances(request, exported, measured),
    )
    manifest = write_manifest(
        manifest_path,
        stage="benchmark",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(files.benchmark / RESULTS_FILE)],
        counts={**data, **{name: value for name, value in results.items() if name not in ("servers", "divergences")}},
    )
    return StageResult(stage="benchmark", reused=False, manifest=manifest, data=data)


def unchanged_drafter(exported: Manifest) -> list[InputFile]:
    """The exported files as inputs.

    Raises:
        Failed: one changed after it was exported.
    """
    described = [describe_input(path_of(output.uri)) for output in exported.outputs]
    changed = [i.uri for i, o in zip(described, exported.outputs, strict=True) if i.sha256 != o.sha256]
    if changed:
        raise Failed(f"changed after export: {', '.join(changed)}; run export again with --force")
    return described


def variants(asked: BenchmarkSettings) -> tuple[Variant, ...]:
    """What is measured, in order."""
    return ("without", "untrained", "trained") if asked.compare_untrained else ("without", "trained")


def drafter_of(request: StageRequest, variant: Variant) -> Path | None:
    """Folder of the drafter that a variant serves with."""
    folders = {"without": None, "untrained": request.files.untrained_drafter, "trained": request.files.drafter}
    folder = folders[variant]
    return folder.resolve() if folder is not None else None


def measure_variant(
    request: StageRequest, exported: Manifest, variant: Variant, held: Sequence[Held], events: Events
) -> Measurement:
    """Measure one variant, or take up what an earlier try measured.

    Raises:
        Failed, Retryable: as ``benchmark``.
    """
    asked, generation = request.settings.benchmark, request.settings.generation
    untrained = variant == "untrained"
    if untrained:
        held = [replace(one, prompts=one.prompts[: max(1, len(one.prompts) // UNTRAINED_SHARE)]) for one in held]
    path = request.files.benchmark / f"{variant}.json"
    key = measurement_key(request, exported, variant, held)
    earlier = read_measurement(path)
    if earlier is not None and earlier.key == key and not request.force:
        events.progress(f"{variant}: measured by an earlier try")
        return earlier
    drafter = drafter_of(request, variant)
    with benchmark_server(request, drafter, events) as url:
        facts = read_server_facts(url)
        require_drafter(facts, drafter, asked)
        load = Load(
            url=url,
            concurrency=asked.concurrency,
            max_new_tokens=min(asked.max_new_tokens, UNTRAINED_NEW_TOKENS if untrained else asked.max_new_tokens),
            request_timeout_seconds=generation.request_timeout_seconds,
            maximum_attempts=generation.maximum_attempts,
            with_drafter=drafter is not None,
            apart=not untrained,
        )
        runs = measure(held, load, events, label=variant)
    measurement = Measurement(key=key, runs=runs, server=facts)
    write_text(path, measurement.model_dump_json(by_alias=True))
    return measurement


def measurement_key(request: StageRequest, exported: Manifest, variant: Variant, held: Sequence[Held]) -> str:
    """What a measurement depends on."""
    settings = request.settings
    asked, serving = settings.benchmark.model_dump(), settings.serving.model_dump(exclude=set(NOT_MEASURED))
    names = SPEED_SETTINGS if variant == "without" else SPEED_SETTINGS + DRAFT_SETTINGS
    return fingerprint_of(
        {
            "version": BENCHMARK_VERSION,
            "settings": {name: asked[name] for name in names},
            "serving": serving,
            "verifier": settings.verifier.model_dump(mode="json"),
            "drafter": None if variant == "without" else exported.fingerprint,
            "prompts": {one.dataset: [[p.sample_id, list(p.prompt_ids)] for p in one.prompts] for one in held},
        }
    )


def read_measurement(path: Path) -> Measurement | None:
    """What an earlier try measured, None when there is nothing of this form."""
    if not path.is_file():
        return None
    try:
        return Measurement.model_validate_json(path.read_bytes())
    except ValidationError:
        return None


def write_results(request: StageRequest, exported: Manifest, measured: Mapping[Variant, Measurement]) -> dict[str, Any]:
    """Write ``results.json``, also for a drafter that is about to fail, and return what it says."""
    asked = request.settings.benchmark
    untrained = measured["untrained"].runs if "untrained" in measured else None
    results = {
        "definition": DEFINITION,
        "drafter_fingerprint": exported.fingerprint,
        **summarise(measured["without"].runs, untrained, measured["trained"].runs),
        "settings": asked.model_dump(),
        "servers": {variant: one.server.model_dump() for variant, one in measured.items()},
    }
    write_json(request.files.benchmark / RESULTS_FILE, results)
    return results


def report(results: Mapping[str, Any], events: Events) -> None:
    """Say what was measured."""
    untrained = results["acceptance_length_untrained"]
    beside = f" (untrained {untrained:.2f})" if untrained is not None else ""
    events.progress(
        f"acceptance length {results['acceptance_length']:.2f}{beside} on {results['prompts']} held-out prompts; "
        f"{results['tokens_per_second']:.0f} tokens/s with the drafter, {results['tokens_per_second_without']:.0f} "
        f"without; greedy output {'identical' if results['lossless'] else 'NOT identical'}"
    )
    for dataset, row in results["per_dataset"].items():
        events.metric(
            benchmark_dataset=dataset,
            acceptance_length=row["acceptance_length"],
            tokens_per_second=row["tokens_per_second"],
            tokens_per_second_without=row["tokens_per_second_without"],
        )
    if not results["lossless"]:
        events.alert("benchmark", f"greedy output differs for {len(results['divergences'])} prompts")


def circumstances(request: StageRequest, exported: Manifest, measured: Mapping[Variant, Measurement]) -> Circumstances:
    """Gather what the checklist of a failed gate is judged by."""
    files, counts = request.files, exported.counts
    vocabulary = read_draft_vocabulary(files.vocabulary, corpus_fingerprint=counts["corpus_fingerprint"])
    produced = output_tokens(measured["without"].runs)
    validation, parity = counts["validation"], read_manifest(files.manifest("capture")).counts["parity"]
    return Circumstances(
        captured_layers=counts["layers"],
        serving_layer_ids=counts["serving_layer_ids"],
        algorithm=measured["trained"].server.speculative_algorithm,
        vocabulary_coverage=float(vocabulary.t2d[produced].mean()),
        estimated_acceptance_length=validation["estimated_acceptance_length"] if validation else None,
        parity=f"captured states against transformers: {json.dumps(parity)}",
    )


def output_tokens(runs: Runs) -> npt.NDArray[np.int64]:
    """All output token ids of the runs, int64 [tokens]."""
    return np.concatenate([np.asarray(r.output_ids, np.int64) for run in runs.values() for r in run.requests])
