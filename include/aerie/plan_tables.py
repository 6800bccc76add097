"""The reference deployment's rows beside the planner's, for ``docs/serving.md``; the planner is the one place of truth.

    python -m aerie.plan_tables docs/serving.md

writes the tables anew between their marks.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from aerie.documents import with_table
from aerie.plan_subjects import Subject, subject_of_settings
from aerie.plans import Machine, plan_inputs
from aerie.serving.model_config import ModelConfig
from aerie.serving.plan_inputs import ObservedPool, PlanInputs
from aerie.serving.planning import plan_memory
from aerie.serving.timeline import plan_timeline
from aerie.settings.bundled import bundled_config
from aerie.settings.pipeline import PipelineSettings, load_settings
from aerie.settings.presets import preset_path

PRESET = "kimi-k25-8x96g"
OBSERVED = (ObservedPool(0.85, "bf16", 116_171), ObservedPool(0.90, "fp8_e4m3", 376_029))
"""Two of the deployment's four pools; the planner has to find the other two."""

POOLS = (
    (0.85, "bf16", 116_171, "baseline"),
    (0.88, "bf16", 159_277, "kept; about 5.5 GiB left"),
    (0.93, "bf16", 231_120, "0.82 GB left; out of memory on a large prefill"),
    (0.90, "fp8_e4m3", 376_029, "rejected: fp8 degrades the model"),
)
HOURS = {
    "B1_glaive": 6.4,
    "B2_opencodeinstruct": 9.4,
    "B3_magicoder": 6.4,
    "B4_mixturethoughts": 6.4,
    "B5_openthoughts": 6.4,
    "B6_ultrachat": 9.6,
    "B7_sharegpt": 6.4,
    "B8_sweagent": 6.0,
}


def with_tables(document: str, *, where: str) -> str:
    """``document`` with what stands between the marks of each table written anew.

    Raises:
        BadInput: a table's marks are missing.
    """
    settings = load_settings(preset_path(PRESET))
    subject = subject_of_settings(settings, edition_folder=Path("/data"))
    pools = ("fraction, KV type", "deployment", "from two rows", "off by", "from config.json", "left, GiB", "verdict")
    document = with_table(document, "pools", (*pools, "what happened"), _pools(subject), where=where)
    heads = ("data set", "prompts", "deployment, h", "planner, h", "sum")
    document = with_table(document, "hours", heads, _hours(settings), where=where)
    return with_table(document, "sums", ("what", "deployment", "planner"), _others(subject, settings), where=where)


def _deployment(subject: Subject, **changes: object) -> PlanInputs:
    """The deployment as its machine was: 8 GPUs with 94.04 GiB free; nothing observed, and no checkpoint on disk."""
    serving = subject.serving.model_copy(update={"observed": {}, **changes})
    config = ModelConfig.of(bundled_config("kimi_k25"))
    bare = replace(subject, serving=serving, config=config, weights_bytes=None)
    return plan_inputs(bare, Machine(gpus=8, gpu_memory_gib=94.04))


def _pools(subject: Subject) -> Iterator[tuple[str, ...]]:
    for fraction, kind, tokens, what in POOLS:
        inputs = _deployment(subject, mem_fraction_static=fraction, kv_cache_dtype=kind)
        alone = plan_memory(inputs, "generate")
        observed = plan_memory(replace(inputs, observed=OBSERVED), "generate")
        off = observed.max_total_num_tokens / tokens - 1
        yield (
            f"{fraction:.2f}, {kind}", f"{tokens:,}", f"{observed.max_total_num_tokens:,}", f"{off:.3%}",
            f"{alone.max_total_num_tokens:,}", f"{observed.headroom_gib:.1f}", observed.verdict, what,
        )  # fmt: skip


def _hours(settings: PipelineSettings) -> Iterator[tuple[str, ...]]:
    timeline = plan_timeline(settings, starts=datetime.now(UTC))
    for row in timeline.datasets:
        if not row.imported:
            yield (
                f"`{row.dataset}`",
                f"{row.prompts:,}",
                f"{HOURS[row.dataset]:.1f}",
                f"{row.uncapped:.1f}",
                row.uncapped_sum,
            )
    prompts = sum(row.prompts or 0 for row in timeline.datasets)
    yield "all", f"{prompts:,}", "57.1", f"{timeline.uncapped:.1f}", "the rows added up"


def _others(subject: Subject, settings: PipelineSettings) -> Iterator[tuple[str, ...]]:
    capped = plan_timeline(settings, starts=datetime.now(UTC)).capped_sum
    yield "capped at 10M tokens a data set", "80M tokens at 930-1,350 tok/s", capped
    kept = _deployment(subject)
    plan = plan_memory(replace(kept, prompt_tokens=207, response_tokens=3793), "generate")
    yield "KV bytes of a token on one GPU", "70,272", f"{plan.bytes_per_token:,}"
    yield "requests at once, of about 4,000 tokens", "about 40", f"{plan.concurrent_requests}"
    yield "hierarchical cache per rank, of 445 GB", "48", f"{plan.hicache_safe_gb_per_rank}"
    too_large = plan_memory(_deployment(subject, hicache_size_gb_per_rank=300, host_ram_gb=449), "generate")
    yield "`--hicache-size 300` of 449 GB", "took the host down", f"{too_large.verdict}: {too_large.reasons[0]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8"), where=str(path)), encoding="utf-8")
