"""The model card of a drafter: README.md in the Hugging Face hub's format, from the drafter's record alone."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from aerie.artefacts.drafter_record import DrafterRecord
from aerie.errors import BadInput
from aerie.settings.pipeline import DraftSettings

METRIC = "acceptance_length"


def model_card(record: DrafterRecord, *, licence: str | None = None) -> str:
    """The card's text.

    Args:
        record: of the drafter; with its benchmark, where it was measured.
        licence: of the drafter, as the hub names licences; None: the card has none.

    Raises:
        BadInput: the record lacks a stage, or its benchmark is of an older version.
    """
    parts = [*_front_matter(record, licence), "", *_facts(record), "", *_sources(record), ""]
    if "benchmark" in record.stages:
        parts += [*_benchmark(record), ""]
    return "\n".join([*parts, *_serving(record), ""])


def _title(record: DrafterRecord) -> str:
    return f"EAGLE-3 drafter for {record.verifier.name}"


def _front_matter(record: DrafterRecord, licence: str | None) -> Iterator[str]:
    results = _results(record)
    data = ModelCardData(
        library_name="sglang",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "eagle3", "draft-model"],
        model_name=_title(record),
        license=licence,
        base_model=record.verifier.huggingface,
        datasets=sorted({one.huggingface for one in record.sources.values() if one.huggingface}) or None,
        metrics=[METRIC] if results else None,
        eval_results=results or None,
    )
    yield "---"
    yield data.to_yaml().rstrip()
    yield "---"


def _results(record: DrafterRecord) -> list[EvalResult]:
    if "benchmark" not in record.stages:
        return []
    rows = _measured(record)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=record.sources[key].huggingface or key if key in record.sources else key,
            dataset_name=f"{key}, held-out prompts",
            metric_type=METRIC,
            metric_name="Acceptance length",
            metric_value=round(row["acceptance_length"], 4),
        )
        for key, row in rows.items()
    ]


def _measured(record: DrafterRecord) -> Mapping[str, Mapping[str, Any]]:
    """What was measured of each data set that has an acceptance length."""
    rows = record.counts("benchmark")["per_dataset"]
    return {key: rows[key] for key in sorted(rows) if rows[key]["acceptance_length"] is not None}


def _facts(record: DrafterRecord) -> Iterator[str]:
    corpus, vocabulary, trained = (record.counts(name) for name in ("merge", "vocabulary", "train"))
    verifier = record.verifier
    validation = trained["validation"] or {}
    yield f"# {_title(record)}"
    yield ""
    facts = {
        "Drafter": record.drafter_id,
        "Drafter fingerprint": record.fingerprint,
        "Edition": record.edition,
        "Corpus fingerprint": corpus["corpus_fingerprint"],
        "Verifier": f"{verifier.huggingface or verifier.name}, revision {verifier.revision or 'unnamed'}, captured and "
        f"served in {verifier.dtype}",
        "Verifier fingerprint": verifier.fingerprint,
        "Training data": f"{corpus['rows']:,} rows, {corpus['tokens']:,} tokens, {corpus['response_tokens']:,} of "
        "the verifier's responses",
        "Draft vocabulary": f"{vocabulary['size']:,} tokens, covering {vocabulary['coverage']:.2%} of response tokens",
        "Auxiliary layers": f"residual streams entering layers {', '.join(map(str, trained['layers']))}",
        "Parameters": f"{trained['drafter_parameters']:,}",
        "Training": f"{trained['epochs']} epochs, {trained['steps']} steps, loss {trained['first_loss']:.3f} to "
        f"{trained['last_loss']:.3f}",
        "Validation": f"loss {validation['loss']:.3f}, about {validation['estimated_acceptance_length']:.2f} tokens a "
        "verify step promised"
        if validation
        else "none",
        "Made with": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
    }
    yield "| | |"
    yield "|---|---|"
    for name, value in facts.items():
        yield f"| {name} | {value} |"


def _sources(record: DrafterRecord) -> Iterator[str]:
    yield "## Data"
    yield ""
    yield "| data set | source | licence |"
    yield "|---|---|---|"
    for key, source in record.sources.items():
        where = f"{source.huggingface}, revision {source.revision}" if source.huggingface else "files of its own"
        yield f"| {key} | {where} | {source.licence} |"


def _benchmark(record: DrafterRecord) -> Iterator[str]:
    counts = record.counts("benchmark")
    if missing := sorted({"definition", "losslessness", "by_concurrency"} - counts.keys()):
        raise BadInput(f"the benchmark of {record.drafter_id} has no {', '.join(missing)}: an older one; run it again")
    yield "## Acceptance length"
    yield ""
    yield f"{counts['definition'][0].upper()}{counts['definition'][1:]}."
    yield ""
    yield "| data set | prompts | acceptance length | tokens/s | tokens/s without |"
    yield "|---|---|---|---|---|"
    for key, row in _measured(record).items():
        yield _row(key, row)
    yield _row("all", counts)
    yield ""
    untrained = counts["acceptance_length_untrained"]
    if untrained is not None:
        yield f"The same drafter untrained: {untrained:.2f}."
    yield f"Lossless: {counts['losslessness']['said']}."
    yield ""
    yield "| requests at once | acceptance length | tokens/s | tokens/s without |"
    yield "|---|---|---|---|"
    for one in counts["by_concurrency"]:
        yield (
            f"| {one['concurrency']} | {one['acceptance_length']:.2f} | {one['tokens_per_second']:,.0f} | "
            f"{one['tokens_per_second_without']:,.0f} |"
        )


def _row(name: str, row: Mapping[str, Any]) -> str:
    return (
        f"| {name} | {row['prompts']} | {row['acceptance_length']:.2f} | {row['tokens_per_second']:,.0f} | "
        f"{row['tokens_per_second_without']:,.0f} |"
    )


def _serving(record: DrafterRecord) -> Iterator[str]:
    yield "## Serving"
    yield ""
    yield "`./aerie deploy THIS_FOLDER`, or with SGLang alone:"
    draft = record.draft
    flags = _flags(draft) if draft else ["--speculative-algorithm", "EAGLE3", "..."]
    yield ""
    if draft is None and "benchmark" in record.stages:
        yield "No draft setting is recommended: each that its benchmark tried changed the verifier's output."
        yield ""
    yield "```"
    yield " ".join(["python -m sglang.launch_server --model-path VERIFIER", *flags])
    yield "```"
    if "vllm" in record.layouts:
        yield from _serving_by_vllm(record.layouts["vllm"], draft)


def _serving_by_vllm(folder: str, draft: DraftSettings | None) -> Iterator[str]:
    """How to serve the other layout: vLLM drafts a chain, so that of the setting only its steps count."""
    speculative = {"method": "eagle3", "model": f"THIS_FOLDER/{folder}"}
    yield ""
    yield f"`{folder}/` has the same drafter in speculators' own layout. With vLLM:"
    yield ""
    yield "```"
    steps = {"num_speculative_tokens": draft.num_steps} if draft else {}
    yield f"vllm serve VERIFIER --speculative-config '{json.dumps({**speculative, **steps})}'"
    yield "```"
    yield ""
    yield (
        f"`vllm serve THIS_FOLDER/{folder}` does too, where the verifier lies at the path in its `config.json` "
        "(`speculators_config.verifier.name_or_path`)."
    )


def _flags(draft: DraftSettings) -> list[str]:
    return [
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "THIS_FOLDER",
        "--speculative-num-steps", str(draft.num_steps), "--speculative-eagle-topk", str(draft.eagle_topk),
        "--speculative-num-draft-tokens", str(draft.num_draft_tokens),
    ]  # fmt: skip
