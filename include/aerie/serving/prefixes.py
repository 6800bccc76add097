"""How much of some prompts begins as another does: what a prefix cache can save, and no more."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class PrefixOverlap:
    """Tokens of all prompts, and of those that a prefix of another prompt already holds."""

    prompts: int
    tokens: int
    shared_tokens: int

    @property
    def share(self) -> float:
        """Share of prompt tokens that need not be computed again, at best."""
        return self.shared_tokens / self.tokens if self.tokens else 0.0

    @property
    def distinct_tokens(self) -> int:
        """Tokens that a cache of every prompt would hold."""
        return self.tokens - self.shared_tokens


def prefix_overlap(prompts: Iterable["array[int]"]) -> PrefixOverlap:
    """Overlap of prompts in whatever order: in sorted order, the longest shared prefix is that with a neighbour."""
    ordered = sorted(prompts)
    shared = sum(_common(one, other) for one, other in pairwise(ordered))
    return PrefixOverlap(len(ordered), sum(map(len, ordered)), shared)


def _common(one: "array[int]", other: "array[int]") -> int:
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))
