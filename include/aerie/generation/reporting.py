"""What people and the time series see of a data set while it is generated, and when it ends."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from aerie.generation.budget import decide
from aerie.generation.population import Population, Stop
from aerie.generation.rates import NEVER, GrowthRate, Span
from aerie.generation.reconciliation import JUDGED
from aerie.stages import Events

SECONDS_PER_HOUR = 3600.0


class Reporter:
    """Reports one run of a data set; counts include earlier runs, rates are of this one."""

    def __init__(self, events: Events, population: Population, *, dataset: str) -> None:
        self._events = events
        self._population = population
        self._dataset = dataset
        self._before = replace(population.counts)
        self._done_before = _done(population)
        self._timeline: Mapping[str, float | None] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count time from now: starting the server is not generating."""
        self._began = time.monotonic()
        self._kept_rate = GrowthRate(self._population.counts.kept_response_tokens, self._began)
        self._done_rate = GrowthRate(_done(self._population), self._began)

    @property
    def seconds(self) -> float:
        """How long this run has taken."""
        return time.monotonic() - self._began

    def figures(self, in_flight: int = 0) -> dict[str, float | int | str | None]:
        """Where the data set is now. The estimated time of arrival is None until a rate is known."""
        population, counts = self._population, self._population.counts
        states = population.count_states()
        seconds = max(self.seconds, 1e-6)
        done = _done(population)
        left = self._time_left(done)
        return {
            "dataset": self._dataset,
            "done": done,
            "prompts": len(population.eligible),
            "kept": states["kept"],
            "quarantined": states["quarantined"],
            "failed": states["failed"],
            **population.count_truncated(),
            "in_flight": in_flight,
            "response_tokens": counts.kept_response_tokens,
            "generated_tokens": counts.generated_tokens,
            "budget_tokens": population.limits.budget_tokens,
            "mean_completion_tokens": counts.judged_tokens / counts.judged if counts.judged else None,
            "requests_per_second": (done - self._done_before) / seconds,
            "tokens_per_second": (counts.generated_tokens - self._before.generated_tokens) / seconds,
            "quarantine_share": states["quarantined"] / counts.judged if counts.judged else None,
            "elapsed_seconds": seconds,
            "eta_seconds": _known(left.expected),
            "eta_low_seconds": _known(left.low),
            "eta_high_seconds": _known(left.high),
            **self._timeline,
        }

    def retime(self, hours: Mapping[str, float | None]) -> None:
        """Have every later row of the time series tell how long the run will take, as it is known now."""
        self._timeline = dict(hours)

    def _time_left(self, done: int) -> Span:
        """Until the budget is kept or the prompts are exhausted, whichever comes first."""
        remaining = decide(self._population.limits, self._population.counts).remaining_tokens
        budget = NEVER if remaining is None else self._kept_rate.seconds_for(remaining)
        return budget.earlier(self._done_rate.seconds_for(len(self._population.eligible) - done))

    def progress(self, in_flight: int, server: Mapping[str, float | None]) -> None:
        """Write the progress line that people know, and a row of the time series; ``server`` is its monitor's."""
        now = time.monotonic()
        self._kept_rate.look(self._population.counts.kept_response_tokens, now)
        self._done_rate.look(_done(self._population), now)
        figures = {**self.figures(in_flight), **server}
        self._events.progress(progress_line(figures), **figures)
        self._events.metric(**figures)

    def close(self, stop: Stop, *, output: Path) -> None:
        """Write the last row of the time series, the summary block, and why it stopped."""
        self._events.metric(**self.figures())
        for line in summary_lines(self._population, dataset=self._dataset, seconds=self.seconds, output=output):
            self._events.progress(line)
        self._events.progress(f"{self._dataset} stopped by {stop.reason}: {stop.message}", stopped_by=stop.reason)


def _done(population: Population) -> int:
    rows, came_out = population.rows, {*JUDGED, "failed"}
    return sum(1 for prompt in population.eligible if rows[prompt.sample_id].state in came_out)


def _known(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None


def progress_line(figures: Mapping[str, Any]) -> str:
    """The progress line, from the figures of ``Reporter.progress``."""
    mean, share, budget = figures["mean_completion_tokens"], figures["quarantine_share"], figures["budget_tokens"]
    tokens = f"{figures['response_tokens']:,}"
    if budget is not None:
        tokens += f"/{budget:,} ({figures['response_tokens'] / budget:.1%})"
    return (
        f"Progress: {figures['done']}/{figures['prompts']} ({figures['failed']} errors), "
        f"{figures['requests_per_second']:.1f} req/s, "
        f"avg completion: {'-' if mean is None else round(mean)} tokens, "
        f"elapsed: {figures['elapsed_seconds']:.0f}s, "
        f"ETA: {_eta(figures)}, "
        f"tokens of budget: {tokens}, {figures['tokens_per_second']:.0f} tok/s, in flight: {figures['in_flight']}, "
        f"quarantined: {'-' if share is None else f'{share:.1%}'}, {_server(figures)}"
    )


def _eta(figures: Mapping[str, Any]) -> str:
    low, high = figures["eta_low_seconds"], figures["eta_high_seconds"]
    if low is None:
        return "-"
    earliest, latest = (None if value is None else f"{value / SECONDS_PER_HOUR:.1f}" for value in (low, high))
    if latest is None:
        return f">{earliest}h"
    return f"{earliest}h" if earliest == latest else f"{earliest}-{latest}h"


def _server(figures: Mapping[str, Any]) -> str:
    gpu = figures["gpu_utilisation"]
    busy = "" if gpu is None else f", GPU: {gpu:.0%}"
    if figures["server_running"] is None:
        return f"server: not known{busy}"
    return (
        f"server: {figures['server_running']:.0f} running, {figures['server_queued']:.0f} queued, "
        f"token usage: {figures['server_token_usage']:.2f}, {figures['server_tokens_per_second']:.0f} tok/s{busy}"
    )


def summary_lines(population: Population, *, dataset: str, seconds: float, output: Path) -> list[str]:
    """The block that closes a data set."""
    counts, states = population.counts, population.count_states()
    kept = [row for row in population.rows.values() if row.state == "kept"]
    reasons = Counter(reason for row in population.rows.values() for reason in row.reasons)
    flags = Counter(flag for row in kept for flag in row.flags)
    reasoning = sum(1 for row in kept if row.reasoning_tokens)
    total = counts.kept_prompt_tokens + counts.kept_response_tokens
    rule = "=" * 60
    return [
        rule,
        f"Generation of {dataset}: {states['kept']:,} of {len(population.rows):,} prompts kept",
        f"  quarantined: {states['quarantined']:,}, failed: {states['failed']:,}, skipped: {states['skipped']:,}, "
        f"not needed: {states['pending']:,}",
        f"  reasons: {_tally(reasons)}",
        f"  flags: {_tally(flags)}",
        f"  truncated: {', '.join(f'{name} {times:,}' for name, times in population.count_truncated().items())}",
        f"  with reasoning: {_per(reasoning, len(kept)):.1%}",
        f"  tokens: {total:,} in all, {counts.kept_response_tokens:,} of responses, "
        f"{counts.generated_tokens:,} generated",
        f"  average sequence: {_per(total, len(kept)):,.0f} tokens, "
        f"average response: {_per(counts.kept_response_tokens, len(kept)):,.0f} tokens",
        f"  time: {seconds:.0f}s",
        f"  output: {output}",
        rule,
    ]


def _tally(names: Counter[str]) -> str:
    return ", ".join(f"{name} {times:,}" for name, times in names.most_common()) or "none"


def _per(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
