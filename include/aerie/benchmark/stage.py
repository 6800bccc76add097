"""The stage ``benchmark``: acceptance length and speed on held-out prompts, greedily, with and without the drafter."""

from aerie.artefacts.files import fingerprint_of
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
from aerie.benchmark.bench import Bench, prompts_to_send, require_sampling
from aerie.benchmark.gates import failed_gates, require_gates
from aerie.benchmark.results import RESULTS_FILE, report, write_results
from aerie.errors import Failed
from aerie.stages import Events, StageRequest, StageResult

NOT_IN_MANIFEST = ("servers", "divergences")


def benchmark(request: StageRequest, events: Events) -> StageResult:
    """Measure the exported drafter and judge it.

    Raises:
        BadInput: there is no export, or no held-out prompt, or a setting cannot be measured here.
        Failed: the drafter is below a threshold, or changes what the verifier says (the results are written first);
            a server runs other weights or settings than asked for.
        Retryable: a server went away.
    """
    files, asked = request.files, request.settings.benchmark
    exported = read_manifest(files.manifest("export"))
    require_sampling(request.settings)
    held = prompts_to_send(request)
    inputs = [*unchanged_drafter(exported), *(describe_input(one.path) for one in held)]
    bench = Bench(request, exported, held, events)
    sampling = bench.sampling
    fingerprint = fingerprint_of(
        {
            "settings": asked.model_dump(mode="json"),
            "drafter": exported.fingerprint,
            "measured_as": bench.measured_as,
            "sampling": None if sampling is None else sampling.model_dump(),
        }
    )
    manifest_path, data = files.manifest("benchmark"), {"drafter_fingerprint": exported.fingerprint}
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None:
        events.progress(f"nothing to do: acceptance length {answer.counts['acceptance_length']:.2f} is of this drafter")
        return StageResult(stage="benchmark", reused=True, manifest=answer, data=data)
    manifest_path.unlink(missing_ok=True)
    measured = bench.measure()
    results, gates, causes = write_results(bench, measured)
    report(results, events)
    counts = {**data, **{name: value for name, value in results.items() if name not in NOT_IN_MANIFEST}}
    if failed_gates(gates):
        events.rejected(fingerprint, counts)
    require_gates(gates, causes)
    manifest = write_manifest(
        manifest_path,
        stage="benchmark",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(files.benchmark / RESULTS_FILE)],
        counts=counts,
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
