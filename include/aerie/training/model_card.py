"""The model card of a published drafter: README.md in the Hugging Face hub's format, from manifests alone."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from aerie.artefacts.manifest import Manifest
from aerie.settings.pipeline import PipelineSettings

PACKAGES = ("speculators", "torch", "transformers")


def versions() -> dict[str, str]:
    """Versions of what trains a drafter."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def model_card(settings: PipelineSettings, manifests: Mapping[str, Manifest]) -> str:
    """The card's text.

    Args:
        settings: the pipeline's configuration.
        manifests: those of ``merge``, ``vocabulary``, ``export`` and ``benchmark``.
    """
    return "\n".join([*_front_matter(settings), "", *_facts(settings, manifests), "", *_benchmark(settings, manifests)])


def _front_matter(settings: PipelineSettings) -> Iterator[str]:
    matter = {
        "library_name": "sglang",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "draft-model"],
        "model_name": f"EAGLE-3 drafter for {settings.verifier.path.name}",
    }
    yield "---"
    yield yaml.safe_dump(matter, sort_keys=False).rstrip()
    yield "---"


def _facts(settings: PipelineSettings, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    corpus, vocabulary, drafter = (manifests[name].counts for name in ("merge", "vocabulary", "export"))
    yield f"# EAGLE-3 drafter for {settings.verifier.path.name}"
    yield ""
    facts = {
        "Edition": manifests["export"].edition,
        "Drafter fingerprint": manifests["export"].fingerprint,
        "Corpus fingerprint": corpus["corpus_fingerprint"],
        "Verifier": f"{settings.verifier.path.name}, revision {settings.verifier.revision or 'unnamed'}, served in "
        f"{settings.verifier.dtype}",
        "Training data": f"{corpus['rows']:,} rows, {corpus['tokens']:,} tokens, {corpus['response_tokens']:,} of "
        f"the verifier's responses; data sets {', '.join(sorted(corpus['datasets']))}",
        "Draft vocabulary": f"{vocabulary['size']:,} tokens, covering {vocabulary['coverage']:.2%} of response tokens",
        "Auxiliary layers": f"residual streams entering layers {', '.join(map(str, drafter['layers']))}",
        "Parameters": f"{drafter['drafter_parameters']:,}, in {drafter['dtype']}",
        "Training": f"{drafter['epochs']} epochs, {drafter['steps']} steps, loss {drafter['first_loss']:.3f} to "
        f"{drafter['last_loss']:.3f}",
        "Made with": ", ".join(f"{name} {version}" for name, version in sorted(drafter["versions"].items())),
    }
    yield "| | |"
    yield "|---|---|"
    for name, value in facts.items():
        yield f"| {name} | {value} |"


def _benchmark(settings: PipelineSettings, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    counts, asked = manifests["benchmark"].counts, settings.benchmark
    yield "## Acceptance length"
    yield ""
    yield (
        "Completion tokens / verify steps, summed over the requests of held-out prompts before dividing; the token "
        f"that the verifier adds to every step is counted. Greedy decoding, {asked.num_steps} steps, top-k "
        f"{asked.eagle_topk}, {asked.num_draft_tokens} draft tokens, at most {asked.max_new_tokens} new tokens, "
        f"{asked.concurrency} requests at once."
    )
    yield ""
    yield "| data set | prompts | acceptance length | tokens/s | tokens/s without |"
    yield "|---|---|---|---|---|"
    for key, row in sorted(counts["per_dataset"].items()):
        yield _row(key, row)
    yield _row("all", counts)
    yield ""
    untrained = counts["acceptance_length_untrained"]
    if untrained is not None:
        yield f"The same drafter untrained: {untrained:.2f}."
    yield f"Greedy output with the drafter equal to the verifier's own: {'yes' if counts['lossless'] else 'no'}."
    yield ""
    yield "```"
    yield (
        "python -m sglang.launch_server --model-path VERIFIER --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path THIS_FOLDER --speculative-num-steps {asked.num_steps} "
        f"--speculative-eagle-topk {asked.eagle_topk} --speculative-num-draft-tokens {asked.num_draft_tokens}"
    )
    yield "```"
    yield ""


def _row(name: str, row: Mapping[str, Any]) -> str:
    return (
        f"| {name} | {row['prompts']} | {row['acceptance_length']:.2f} | {row['tokens_per_second']:,.0f} | "
        f"{row['tokens_per_second_without']:,.0f} |"
    )
