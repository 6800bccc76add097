"""What a data set may still generate. One function decides; everybody asks it.

A budget counts kept response tokens that are durably written, of earlier runs too. Requests in flight are finished and
never aborted (aborting the long ones would bias the data to short answers), so admission looks ahead: another request
starts only while what is kept and what those in flight are likely to bring stay below the limit. Likely is one
standard deviation above the expectation: a request that was started in a dip of the estimate cannot be taken back, so
an even bet, taken again and again, would end above the limit. Fewer in flight leave less doubt: admission tapers.
"""

import math
from dataclasses import dataclass
from typing import Literal

from aerie.generation.lengths import Forecast
from aerie.settings.pipeline import DatasetSettings
from aerie.store.queries.ledger import LedgerCounts

StopReason = Literal[
    "budget",
    "max_total_tokens",
    "max_samples",
    "prompts_exhausted",
    "cost_ceiling",
    "canary",
    "quarantine_rate",
    "errors",
]
SUCCESSES: tuple[StopReason, ...] = ("budget", "max_total_tokens", "max_samples", "prompts_exhausted")

CERTAIN_SAMPLES = 32.0  # finished samples that the assumption "every sample is kept" weighs as much as


@dataclass(frozen=True)
class Limits:
    """Where a data set ends; None is no limit.

    ``budget_tokens`` counts kept response tokens, ``max_total_tokens`` those and their prompts, ``max_samples`` kept
    samples, ``cost_ceiling_tokens`` every response token, kept or not.
    """

    budget_tokens: int | None
    max_total_tokens: int | None = None
    max_samples: int | None = None
    cost_ceiling_tokens: int | None = None

    @property
    def cost_only(self) -> "Limits":
        """The cost ceiling alone: what somebody asked for again is generated whatever the budget has."""
        return Limits(None, cost_ceiling_tokens=self.cost_ceiling_tokens)

    @classmethod
    def of(cls, dataset: DatasetSettings) -> "Limits":
        """Limits of a data set; its budget of 0 means all prompts."""
        return cls(
            dataset.budget_tokens or None, dataset.max_total_tokens, dataset.max_samples, dataset.cost_ceiling_tokens
        )


@dataclass
class Counts:
    """What is durable so far: samples judged and kept, and tokens."""

    judged: int = 0
    kept: int = 0
    kept_response_tokens: int = 0
    kept_prompt_tokens: int = 0
    judged_tokens: int = 0
    generated_tokens: int = 0

    @classmethod
    def of(cls, ledger: LedgerCounts) -> "Counts":
        """Counts of a ledger."""
        return cls(
            judged=ledger.kept + ledger.quarantined,
            kept=ledger.kept,
            kept_response_tokens=ledger.kept_response_tokens,
            kept_prompt_tokens=ledger.kept_prompt_tokens,
            judged_tokens=ledger.judged_tokens,
            generated_tokens=ledger.generated_tokens,
        )

    def add(self, *, kept: bool, prompt_tokens: int, response_tokens: int) -> None:
        """Count one more durable response."""
        self.judged += 1
        self.judged_tokens += response_tokens
        self.generated_tokens += response_tokens
        if kept:
            self.kept += 1
            self.kept_response_tokens += response_tokens
            self.kept_prompt_tokens += prompt_tokens

    @property
    def kept_share(self) -> float:
        """Share of response tokens that are kept, leaning towards all of them while little is judged."""
        if not self.judged:
            return 1.0
        share = self.kept_response_tokens / self.judged_tokens if self.judged_tokens else self.kept / self.judged
        return (CERTAIN_SAMPLES + share * self.judged) / (CERTAIN_SAMPLES + self.judged)


@dataclass(frozen=True)
class InFlight:
    """Requests that have started: how many, their prompts' tokens, and their expected response tokens."""

    requests: int
    prompt_tokens: int
    response: Forecast


NOTHING_IN_FLIGHT = InFlight(0, 0, Forecast(0.0, 0.0))


@dataclass(frozen=True)
class Decision:
    """``reached`` names the limit that is met by what is durable; ``start`` says whether another request may start.

    ``remaining_tokens`` is what the budget still asks for (response tokens, None without a budget).
    """

    reached: StopReason | None
    start: bool
    remaining_tokens: int | None


def decide(limits: Limits, counts: Counts, in_flight: InFlight = NOTHING_IN_FLIGHT) -> Decision:
    """Decide whether another request may start, whether the data set is complete, and how much is left."""
    reached = _reached(limits, counts)
    remaining = None if limits.budget_tokens is None else max(0, limits.budget_tokens - counts.kept_response_tokens)
    return Decision(reached, reached is None and _has_room(limits, counts, in_flight), remaining)


def _reached(limits: Limits, counts: Counts) -> StopReason | None:
    """The limits in order: a data set that has all it asked for is complete whatever it cost."""
    checks: tuple[tuple[StopReason, int | None, int], ...] = (
        ("budget", limits.budget_tokens, counts.kept_response_tokens),
        ("max_total_tokens", limits.max_total_tokens, counts.kept_response_tokens + counts.kept_prompt_tokens),
        ("max_samples", limits.max_samples, counts.kept),
        ("cost_ceiling", limits.cost_ceiling_tokens, counts.generated_tokens),
    )
    return next((reason for reason, limit, value in checks if limit is not None and value >= limit), None)


def _has_room(limits: Limits, counts: Counts, in_flight: InFlight) -> bool:
    likely = in_flight.response.mean + math.sqrt(in_flight.response.variance)
    likely_kept = likely * counts.kept_share
    expected_prompts = in_flight.prompt_tokens * counts.kept_share
    return all(
        limit is None or value < limit
        for limit, value in (
            (limits.budget_tokens, counts.kept_response_tokens + likely_kept),
            (
                limits.max_total_tokens,
                counts.kept_response_tokens + counts.kept_prompt_tokens + likely_kept + expected_prompts,
            ),
            (limits.max_samples, counts.kept + in_flight.requests),
            (limits.cost_ceiling_tokens, counts.generated_tokens + likely),
        )
    )
