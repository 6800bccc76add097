"""What a drafter must be to be worth serving."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aerie.benchmark.advice import advised
from aerie.benchmark.checklist import Cause, told
from aerie.benchmark.losslessness import Losslessness
from aerie.benchmark.production import Production
from aerie.errors import Failed

NEVER_ACCEPTS = 1.01
"""At or below this a drafter's proposals are never taken: something is wired wrongly, whatever the threshold."""


@dataclass(frozen=True)
class Gate:
    """One condition, and how it went."""

    gate: str
    verdict: Literal["passed", "failed", "not judged"]
    said: str


def judge_gates(
    length: float, *, minimum: float, production: Production, minimum_share: float, lossless: Losslessness
) -> list[Gate]:
    """Judge a drafter.

    Args:
        length: its acceptance length.
        minimum: the least that it must be.
        production: the drafter in production, on the same prompts.
        minimum_share: the least share of that one's acceptance length; 0 compares with none.
        lossless: the verdict on its outputs.
    """
    return [
        Gate(
            "accepts at all",
            "passed" if length > NEVER_ACCEPTS else "failed",
            f"acceptance length {length:.3f}"
            + ("" if length > NEVER_ACCEPTS else ": the drafter's proposals are practically never accepted"),
        ),
        Gate(
            "threshold",
            "passed" if length >= minimum else "failed",
            f"acceptance length {length:.3f} is {'at least' if length >= minimum else 'below'} "
            f"benchmark.minimum_acceptance_length {minimum:g}",
        ),
        _against_production(length, production, minimum_share),
        Gate(
            "lossless",
            "failed" if lossless.verdict == "changed" else "passed",
            f"greedy output with the drafter: {lossless.said}",
        ),
    ]


def _against_production(length: float, production: Production, minimum_share: float) -> Gate:
    name = "against the drafter in production"
    if minimum_share == 0:
        return Gate(name, "not judged", "benchmark.minimum_share_of_production is 0")
    if production.drafter_id is None:
        return Gate(name, "not judged", production.said)
    if production.acceptance_length is None:
        return Gate(
            name,
            "failed",
            f"{production.drafter_id} is in production, but {production.said}: whether this drafter is at least as "
            "good cannot be told. Bring it back there, or publish it again; to publish without the comparison, set "
            "benchmark.minimum_share_of_production to 0",
        )
    share = length / production.acceptance_length
    return Gate(
        name,
        "passed" if share >= minimum_share else "failed",
        f"acceptance length {length:.3f} is {share:.1%} of the {production.acceptance_length:.3f} of "
        f"{production.drafter_id} on the same prompts ({production.said}); at least {minimum_share:.0%} was asked for "
        "(benchmark.minimum_share_of_production)",
    )


def require_gates(gates: Sequence[Gate], causes: Sequence[Cause]) -> None:
    """Require that no gate failed.

    Raises:
        Failed: with every gate that did, the checklist of usual causes, and what to do.
    """
    failed = failed_gates(gates)
    if failed:
        suspects = [cause.cause for cause in causes if cause.verdict == "suspect"]
        advice = advised([gate.gate for gate in failed], suspects)
        raise Failed("\n".join([*(gate.said for gate in failed), told(causes), *advice]))


def failed_gates(gates: Sequence[Gate]) -> list[Gate]:
    """The gates that failed."""
    return [gate for gate in gates if gate.verdict == "failed"]
