"""Whether a drafter changes what the verifier says.

In float32 greedy outputs with and without the drafter must be identical. In lower precision the sums of a batch of
another size round otherwise, so that outputs may part where two tokens are as good as equally likely, and no more often
than the verifier's own outputs part between batches of 1 and of 8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, inf
from typing import Any, Literal

from aerie.benchmark.measures import Divergence

TIE_NATS = 0.05
"""Two tokens whose log-probabilities are this near may change places by rounding."""

BATCH_SIZES = (1, 8)
"""Between these the verifier's own outputs are compared, where they may part at all."""

Verdict = Literal["identical", "ties", "changed"]


@dataclass(frozen=True)
class Parting:
    """A divergence, and the log-probabilities in nats of the most likely tokens there, of the plain verifier.

    ``likely`` is None where it was not asked.
    """

    divergence: Divergence
    likely: Mapping[int, float] | None

    @property
    def gap_nats(self) -> float | None:
        """How far the less likely of the two tokens is from the most likely one; None where that is not known."""
        if self.likely is None:
            return None
        found = [self.likely.get(token) for token in self.tokens if token is not None]
        known = [value for value in found if value is not None]
        return max(self.likely.values()) - min(known) if len(known) == len(self.tokens) else None

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """The two tokens."""
        return self.divergence.own_token, self.divergence.other_token

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it; never where a token is not among the most likely, or an output just ended."""
        return (gap := self.gap_nats) is not None and gap <= TIE_NATS


@dataclass(frozen=True)
class Share:
    """So many of the outputs compared parted."""

    parted: int
    compared: int

    @property
    def share(self) -> Fraction:
        """The share that parted."""
        return Fraction(self.parted, self.compared)

    @property
    def said(self) -> str:
        """In words."""
        return f"{self.parted} of {self.compared}"


@dataclass(frozen=True)
class Losslessness:
    """The verdict, with what it is judged by."""

    verdict: Verdict
    exact: bool
    outputs: Share
    ties: int
    between_batch_sizes: Share | None
    said: str

    @property
    def document(self) -> dict[str, Any]:
        """As it stands in the results."""
        own = self.between_batch_sizes
        return {
            "verdict": self.verdict,
            "exact": self.exact,
            "compared": self.outputs.compared,
            "parted": self.outputs.parted,
            "ties": self.ties,
            "tie_nats": TIE_NATS,
            "between_batch_sizes": None if own is None else {"sizes": list(BATCH_SIZES), **vars(own)},
            "said": self.said,
        }


def judge(
    partings: Sequence[Parting], *, compared: int, exact: bool, between_batch_sizes: Share | None
) -> Losslessness:
    """Judge the partings of ``compared`` outputs with the drafter from those without.

    Args:
        partings: every one, at any concurrency.
        compared: outputs that were compared.
        exact: whether they must be identical, as in float32.
        between_batch_sizes: how often the verifier's own outputs part; needed where they need not be identical.
    """
    outputs = Share(len(partings), compared)
    ties = sum(parting.is_tie for parting in partings)

    def say(verdict: Verdict, said: str) -> Losslessness:
        return Losslessness(verdict, exact, outputs, ties, between_batch_sizes, said)

    if not partings:
        return say("identical", f"identical for all {compared} outputs")
    parted = f"{len(partings)} of {compared} outputs with the drafter are not the verifier's own"
    if exact:
        return say("changed", f"{parted}, first {_where(partings[0])}: in float32 they must be identical")
    untied = [parting for parting in partings if not parting.is_tie]
    if untied:
        furthest = max(untied, key=lambda parting: inf if parting.gap_nats is None else parting.gap_nats)
        gap = furthest.gap_nats
        apart = "at least one of the two is not among the most likely" if gap is None else f"{gap:.3f} nats apart"
        number = f"{len(untied)} of them without a tie, the furthest"
        return say("changed", f"{parted}, {number} {_where(furthest)}: tokens {furthest.tokens}, {apart}")
    if between_batch_sizes is None:
        return say("changed", f"{parted}, all at ties, and how often they part without it is not known")
    if outputs.share > between_batch_sizes.share:
        chance = _chance_of_so_many(outputs, between_batch_sizes)
        return say(
            "changed",
            f"{parted}, all at ties, but more often than between batches of 1 and 8 without it "
            f"({between_batch_sizes.said}); were both as likely to part, chance alone would show so many in "
            f"{chance:.2g} of such comparisons",
        )
    return say(
        "ties",
        f"{parted}, each where two tokens are within {TIE_NATS:g} nats, and no more often than between batches of 1 "
        f"and 8 without it ({between_batch_sizes.said})",
    )


def _where(parting: Parting) -> str:
    one = parting.divergence
    return f"at token {one.position} of sample {one.sample_id} ({one.dataset})"


def _chance_of_so_many(left: Share, right: Share) -> float:
    """How likely ``left`` parts so often or more, were it as likely to part as ``right``: Fisher's exact test."""
    parted, compared = left.parted + right.parted, left.compared + right.compared
    as_many = range(left.parted, min(parted, left.compared) + 1)
    ways = sum(comb(left.compared, k) * comb(right.compared, parted - k) for k in as_many)
    return ways / comb(compared, parted)
