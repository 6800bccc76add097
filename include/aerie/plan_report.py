"""A whole plan for people, as tables with their sums, and for programs, as one document."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from aerie.plans import WholePlan, command_of
from aerie.serving.plan import FULL_PRECISION_KV
from aerie.serving.planning import MemoryPlan, Sum
from aerie.serving.timeline import Range, Timeline, as_document

DIGITS = 4
LOG_COLUMNS = 120


def document_of(plan: WholePlan, python: Path) -> dict[str, Any]:
    """The plan as data. The keys at the top are the first phase's, with the verdict and the reasons of all."""
    face = _memory(plan, plan.face, python)
    return {
        **face,
        "verdict": plan.verdict,
        "reasons": list(plan.reasons),
        "model": plan.subject.name,
        "gpus": plan.machine.gpus,
        "timeline": as_document(plan.timeline) if plan.timeline else None,
        "estimated": sorted({one for phase in plan.phases.values() for one in phase.estimated}),
        "notes": [*plan.subject.notes, *_notes(plan)],
        "phases": {name: _memory(plan, phase, python) for name, phase in plan.phases.items()},
        **({"suggestion": _suggestion(plan)} if plan.suggestion_asked else {}),
    }


def _memory(plan: WholePlan, memory: MemoryPlan, python: Path) -> dict[str, Any]:
    server = plan.servers.get(memory.phase)
    return {
        "phase": memory.phase,
        "verdict": memory.verdict,
        "reasons": list(memory.reasons),
        "max_total_num_tokens": memory.max_total_num_tokens,
        "bytes_per_token": memory.bytes_per_token,
        "gpu_memory_gib": round(memory.gpu_memory_gib, DIGITS),
        "weights_gib": round(memory.weights_gib, DIGITS),
        "drafter_gib": round(memory.drafter_gib, DIGITS),
        "kv_pool_gib": round(memory.kv_pool_gib, DIGITS),
        "graphs_gib": round(memory.graphs_gib, DIGITS),
        "headroom_gib": round(memory.headroom_gib, DIGITS),
        "concurrent_requests": memory.concurrent_requests,
        "expected_token_usage": memory.expected_token_usage,
        "hicache_gb_per_rank": memory.hicache_gb_per_rank,
        "hicache_gb_total": memory.hicache_gb_total,
        "hicache_safe_gb_per_rank": memory.hicache_safe_gb_per_rank,
        "host_available_gb": memory.host_available_gb,
        "host_loading_gb": memory.host_loading_gb,
        "host_states_gb": round(memory.host_states_gb, DIGITS),
        "command": command_of(server, python) if server else None,
        "sums": [{"name": one.name, "amount": one.amount, "sum": one.arithmetic} for one in memory.sums],
    }


def _suggestion(plan: WholePlan) -> dict[str, Any] | None:
    return vars(plan.suggestion) if plan.suggestion else None


def _notes(plan: WholePlan) -> Iterator[str]:
    face, serving = plan.face, plan.subject.serving
    if serving.allow_quantised_kv and serving.kv_cache_dtype not in FULL_PRECISION_KV:
        yield f"KV type {serving.kv_cache_dtype} is allowed for a reason: {serving.allow_quantised_kv}"
    if face.hicache_gb_per_rank:
        yield (
            "the hierarchical cache keeps prefixes that were evicted; it adds no decode slots, and prompts that are "
            "long and unlike gain nothing from it"
        )
        if plan.overlap is None:
            yield "how much it can save is not known: give prompts (--prompts FILE)"
    if plan.overlap is not None:
        overlap = plan.overlap
        held_gb = overlap.distinct_tokens * face.bytes_per_token / 1e9
        yield (
            f"of {overlap.tokens:,} prompt tokens in {overlap.prompts:,} prompts {overlap.shared_tokens:,} "
            f"({overlap.share:.1%}) begin as another prompt does: so much prefill can be saved at best; all prefixes "
            f"together take {overlap.distinct_tokens:,} x {face.bytes_per_token:,} bytes = {held_gb:,.1f} GB a rank"
        )


def render(plan: WholePlan, python: Path) -> Iterator[RenderableType]:
    """The plan for a person at a terminal, the verdict last."""
    yield f"{plan.subject.name}: {plan.subject.config.model_type}, {plan.subject.path}"
    for note in plan.subject.notes:
        yield f"Note: {note}"
    yield _phase_table(plan)
    yield from _sum_tables(plan)
    for note in _notes(plan):
        yield f"Note: {note}"
    if plan.timeline is not None:
        yield from _timeline(plan.timeline)
    else:
        yield "Timeline: not known without data sets: name a preset or a configuration (AERIE_CONFIG)"
    for phase, memory in plan.phases.items():
        server = plan.servers.get(phase)
        yield f"\n# {phase}" if server else f"\n# {phase}: no command, the plan is refused: {memory.reasons[0]}"
        if server:
            yield command_of(server, python)
    yield ""
    if plan.suggestion_asked:
        yield from _suggestion_lines(plan)
    if estimated := sorted({one for phase in plan.phases.values() for one in phase.estimated}):
        yield f"Estimated, neither given nor measured: {'; '.join(estimated)}"
    yield f"Verdict: {plan.verdict}"
    for reason in plan.reasons:
        yield f"  {reason}"


def text_of(plan: WholePlan, python: Path) -> str:
    """The same as plain text, for a log."""
    out = StringIO()
    console = Console(file=out, width=LOG_COLUMNS, soft_wrap=True, highlight=False, markup=False, emoji=False)
    for part in render(plan, python):
        console.print(part)
    return out.getvalue()


def _phase_table(plan: WholePlan) -> Table:
    where = "The host" if plan.machine.gpus == 0 else "Each GPU"
    table = Table(title=f"{where}, in GiB", title_justify="left")
    table.add_column("")
    for phase in plan.phases:
        table.add_column(phase, justify="right")
    memories = plan.phases.values()
    for name, amounts in (
        ("weights", [f"{one.weights_gib:.2f}" for one in memories]),
        ("drafter", [f"{one.drafter_gib:.2f}" if one.drafter_gib else "-" for one in memories]),
        ("KV pool", [f"{one.kv_pool_gib:.2f}" for one in memories]),
        ("graphs and buffers", [f"{one.graphs_gib:.2f}" for one in memories]),
        ("left for activations", [f"{one.headroom_gib:.2f}" for one in memories]),
        ("KV tokens", [f"{one.max_total_num_tokens:,}" for one in memories]),
        ("requests at once", [_count(one.concurrent_requests) for one in memories]),
        ("verdict", [one.verdict for one in memories]),
    ):
        table.add_row(name, *amounts)
    return table


def _sum_tables(plan: WholePlan) -> Iterator[Table]:
    """The sums of the first phase, and of the others those that differ."""
    rows = (Sum("machine", "", plan.machine.source), *plan.face.sums)
    yield _sum_table(f"The sums, phase {plan.face.phase}", rows)
    others: dict[tuple[Sum, ...], list[str]] = {}
    for phase, memory in plan.phases.items():
        if differing := tuple(one for one in memory.sums if one not in plan.face.sums):
            others.setdefault(differing, []).append(phase)
    for differing, phases in others.items():
        yield _sum_table(f"What differs in {' and '.join(phases)}", differing)


def _sum_table(title: str, rows: Iterable[Sum]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("what", "how much", "sum"):
        table.add_column(column, justify="right" if column == "how much" else "left", overflow="fold")
    for one in rows:
        table.add_row(one.name, one.amount, one.arithmetic)
    return table


def _timeline(timeline: Timeline) -> Iterator[RenderableType]:
    table = Table(title="Timeline, in hours", title_justify="left")
    table.add_column("")
    for column in ("prompts", "uncapped", "capped"):
        table.add_column(column, justify="right")
    table.add_column("sum of what is capped", overflow="fold")
    for row in timeline.datasets:
        table.add_row(
            row.dataset,
            _count(row.prompts),
            "-" if row.imported else _hours(row.uncapped),
            "-" if row.imported else _range(row.capped),
            row.capped_sum or "not known",
        )
    prompts = [row.prompts for row in timeline.datasets if not row.imported]
    total = f"{sum(filter(None, prompts)):,}" if None not in prompts else "-"
    table.add_section()
    table.add_row("generation", total, _hours(timeline.uncapped), _range(timeline.capped), timeline.capped_sum)
    for phase in timeline.phases:
        table.add_row(phase.phase, "", "", _range(phase.hours), phase.sum)
    yield table
    yield from (f"Note: {note}" for note in timeline.notes)
    if timeline.generation_ends:
        yield f"Generation, begun {timeline.starts:%Y-%m-%d %H:%M %Z}, ends {_between(timeline.generation_ends)}"
    if timeline.ends:
        yield f"The run ends {_between(timeline.ends)}"
    if timeline.unknown:
        yield f"{'Not known' if timeline.ends else 'No end is known'}: {'; '.join(timeline.unknown)}"


def _between(dates: tuple[datetime, datetime]) -> str:
    first, last = (f"{moment:%Y-%m-%d %H:%M}" for moment in dates)
    return first if first == last else f"between {first} and {last}"


def _count(number: int | None) -> str:
    return "not known" if number is None else f"{number:,}"


def _hours(hours: float | None) -> str:
    return "not known" if hours is None else f"{hours:,.1f}"


def _range(hours: Range | None) -> str:
    return "not known" if hours is None else str(hours)


def _suggestion_lines(plan: WholePlan) -> Iterator[str]:
    best = plan.suggestion
    if best is None:
        yield "Suggested: nothing; no fraction leaves enough in every phase"
        return
    yield f"Suggested: --mem-fraction {best.mem_fraction_static:g} for {best.max_total_num_tokens:,} KV tokens"
    yield f"  {best.reason}"
    if best.hicache_size_gb_per_rank:
        yield f"Suggested: --hicache-size {best.hicache_size_gb_per_rank} (GB per rank)"
    elif best.hicache_size_gb_per_rank is None:
        yield "Suggested: no hierarchical cache while the host's memory is not known (--host-ram-gb)"
    if best.concurrency is None:
        yield "Suggested: a concurrency needs the lengths of prompts and responses"
    else:
        yield f"Suggested: {best.concurrency} requests in flight, twice as many as run at once"
