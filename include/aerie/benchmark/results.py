"""What a benchmark came to: figures, recommendation, gates and checklist, as ``results.json`` and as lines of a log."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aerie.artefacts.corpus import DATASET_FOLDER
from aerie.artefacts.draft_vocabulary import read_draft_vocabulary
from aerie.artefacts.files import write_json
from aerie.artefacts.manifest import read_manifest
from aerie.artefacts.verifier_tokens import read_verifier_tokens
from aerie.benchmark.bench import GREEDY_ON_CPU, Bench, Measured
from aerie.benchmark.boundaries import Boundaries, compare_boundaries
from aerie.benchmark.checklist import Cause, Circumstances, evaluate
from aerie.benchmark.estimate import Estimate, estimate_of
from aerie.benchmark.gates import Gate, judge_gates
from aerie.benchmark.measures import DEFINITION, Runs, summarise
from aerie.benchmark.recommendation import NONE_SOUND, ONE_ALONE, RULE, recommend
from aerie.benchmark.server import verifier_identity
from aerie.errors import Failed
from aerie.settings.pipeline import DraftSettings
from aerie.stages import Events

RESULTS_FILE = "results.json"


def write_results(bench: Bench, measured: Measured) -> tuple[dict[str, Any], list[Gate], list[Cause]]:
    """Write ``results.json``, also for a drafter that is about to fail; return what it says, gates and checklist.

    Its figures are of the first concurrency; ``by_concurrency`` has all.
    """
    asked = bench.asked
    rows = [_row(measured, number) for number in asked.concurrency]
    length = rows[0]["acceptance_length"]
    if length is None:
        raise Failed("every answer was one token long: nothing was verified; raise benchmark.max_new_tokens")
    estimate = estimate_of_training(bench)
    causes = evaluate(circumstances(bench, measured, estimate, served=length))
    gates = judge_gates(
        length,
        minimum=asked.minimum_acceptance_length,
        production=measured.production,
        minimum_share=asked.minimum_share_of_production,
        lossless=measured.lossless,
    )
    results = {
        "definition": DEFINITION,
        "drafter_fingerprint": bench.exported.fingerprint,
        "verifier": verifier_identity(bench.request.settings.verifier.path),
        "measured_as": bench.measured_as,
        **rows[0],
        "settings": {**asked.model_dump(mode="json"), "concurrency": asked.concurrency[0]},
        "by_concurrency": [{name: value for name, value in row.items() if name != "divergences"} for row in rows],
        "losslessness": measured.lossless.document,
        **at_temperature(bench, measured),
        **recommendation(bench, measured),
        "estimate": None if estimate is None else estimate.document(length),
        "gates": [vars(gate) for gate in gates],
        "checklist": [vars(cause) for cause in causes],
        "servers": {
            name: one.server.model_dump()
            for name, one in (
                ("without", measured.without[asked.concurrency[0]]),
                ("untrained", measured.untrained),
                ("trained", measured.trained[asked.concurrency[0]]),
            )
            if one is not None
        },
    }
    write_json(bench.request.files.benchmark / RESULTS_FILE, results)
    return results, gates, causes


def _row(measured: Measured, concurrency: int) -> dict[str, Any]:
    """Figures at one concurrency. The untrained drafter was measured at the first alone, and stands beside each."""
    untrained = measured.untrained.runs if measured.untrained else None
    figures = summarise(measured.without[concurrency].runs, untrained, measured.trained[concurrency].runs)
    return {"concurrency": concurrency, **figures}


def at_temperature(bench: Bench, measured: Measured) -> dict[str, Any]:
    """Acceptance at the sampling of generation (``sampled``), or why it was not measured."""
    if measured.sampled is None:
        on_cpu = bench.request.settings.serving.device == "cpu"
        return {"sampled": None, "not_measured": {"sampled": GREEDY_ON_CPU if on_cpu else "benchmark.sampled is false"}}
    figures = summarise(None, None, measured.sampled.runs)
    names = ("acceptance_length", "acceptance_rate", "acceptance_by_position", "tokens_per_second")
    return {
        "sampled": {
            "sampling": bench.request.settings.load_sampling().model_dump(),
            **{name: figures[name] for name in names},
            "per_dataset": {key: {name: row[name] for name in names} for key, row in figures["per_dataset"].items()},
        },
        "not_measured": {},
    }


def recommendation(bench: Bench, measured: Measured) -> dict[str, Any]:
    """The draft setting to serve with (``recommended``), and what it was chosen from and by.

    None is recommended where every one that was tried changed the output.
    """
    tried = measured.tried
    best = recommend(tried)
    if best is not None:
        recommended, rule = best.setting.model_dump(), RULE
    elif tried or measured.lossless.verdict == "changed":
        recommended, rule = None, NONE_SOUND
    else:
        recommended, rule = bench.asked.drafting.model_dump(), ONE_ALONE
    return {
        "recommended": recommended,
        "recommendation": {
            "rule": rule,
            "concurrency": bench.asked.concurrency[0],
            "tried": [
                {
                    **one.setting.model_dump(),
                    "acceptance_length": one.acceptance_length,
                    "tokens_per_second": round(one.tokens_per_second, 1),
                    "different_outputs": one.different_outputs,
                }
                for one in tried
            ],
        },
    }


def report(results: Mapping[str, Any], events: Events) -> None:
    """Say what was measured."""
    untrained, estimate = results["acceptance_length_untrained"], results["estimate"]
    beside = f" (untrained {untrained:.2f})" if untrained is not None else ""
    promised = "no validation to compare with"
    if estimate is not None:
        promised = (
            f"validation promised {estimate['acceptance_length']:.2f}, {estimate['relative_distance']:+.1%} from it"
        )
    events.progress(
        f"acceptance length {results['acceptance_length']:.2f}{beside} on {results['prompts']} held-out prompts; "
        f"{promised}; greedy output {results['losslessness']['said']}"
    )
    for row in results["by_concurrency"]:
        events.progress(
            f"at {row['concurrency']} at once: {row['tokens_per_second']:.0f} tokens/s with the drafter, "
            f"{row['tokens_per_second_without']:.0f} without, {row['speed_up']:.2f} times as fast"
        )
    sampled = results["sampled"]
    if sampled is None:
        events.progress(f"acceptance at a temperature was not measured: {results['not_measured']['sampled']}")
    else:
        temperature = sampled["sampling"]["temperature"]
        events.progress(f"at temperature {temperature:g}: acceptance length {sampled['acceptance_length']:.2f}")
    recommended = results["recommended"]
    setting = "no draft setting" if recommended is None else DraftSettings.model_validate(recommended).words
    events.progress(f"recommended: {setting} ({results['recommendation']['rule']})")
    for gate in results["gates"]:
        events.progress(f"gate {gate['gate']}: {gate['verdict']}: {gate['said']}")
    for dataset, row in results["per_dataset"].items():
        events.metric(
            benchmark_dataset=dataset,
            acceptance_length=row["acceptance_length"],
            tokens_per_second=row["tokens_per_second"],
            tokens_per_second_without=row["tokens_per_second_without"],
        )
    if results["losslessness"]["verdict"] != "identical":
        events.alert("benchmark", f"greedy output {results['losslessness']['said']}")


def estimate_of_training(bench: Bench) -> Estimate | None:
    """The acceptance length that validation promised; None without validation rows."""
    vocabulary = read_manifest(bench.request.files.manifest("vocabulary"))
    return estimate_of(
        bench.exported.counts["validation"],
        coverage=vocabulary.counts["coverage"],
        num_steps=bench.asked.num_steps,
    )


def circumstances(bench: Bench, measured: Measured, estimate: Estimate | None, *, served: float) -> Circumstances:
    """Gather what the checklist is judged by."""
    files, counts, settings = bench.request.files, bench.exported.counts, bench.request.settings
    first = bench.asked.concurrency[0]
    vocabulary = read_draft_vocabulary(files.vocabulary, corpus_fingerprint=counts["corpus_fingerprint"])
    own = {key: run for key, run in measured.without[first].runs.items() if key in settings.datasets}
    facts = measured.trained[first].server
    configuration = json.loads((files.drafter / "config.json").read_text(encoding="utf-8"))
    return Circumstances(
        captured_layers=counts["layers"],
        exported_layer_ids=counts["serving_layer_ids"],
        served_layer_ids=configuration["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        parity=read_manifest(files.manifest("capture")).counts["parity"],
        last_slot=counts.get("last_slot"),
        rows=counts.get("boundaries"),
        coverage=float(vocabulary.t2d[output_tokens(own)].mean()),
        minimum_coverage=settings.vocabulary.minimum_coverage,
        algorithm=facts.speculative_algorithm,
        window=facts.speculative_draft_window_size,
        boundaries=boundaries(bench, own),
        estimate=estimate,
        served=served,
        first_loss=counts["first_loss"],
        last_loss=counts["last_loss"],
    )


def boundaries(bench: Bench, own: Runs) -> Boundaries | None:
    """Where reasoning ends in the corpus and here; None for a verifier that closes it with no single token."""
    settings = bench.request.settings
    close = settings.verifier.load_profile().reasoning.close
    known = read_verifier_tokens(bench.request.files.dataset(bench.held[0].dataset).verifier_tokens).token_ids
    if not settings.verifier.thinking or not isinstance(close, str) or close not in known:
        return None
    corpus = bench.request.files.corpus / DATASET_FOLDER
    return compare_boundaries(corpus, own, token=close, token_id=known[close])


def output_tokens(runs: Runs) -> npt.NDArray[np.int64]:
    """All output token ids of the runs, int64 [tokens]."""
    return np.concatenate([np.asarray(r.output_ids, np.int64) for run in runs.values() for r in run.requests])
