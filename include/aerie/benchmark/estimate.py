"""The acceptance length that validation promises, and how far the served one is from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """An offline estimate for a chain of drafts.

    ``accuracies`` are of validation rows: position i's among the places where all before it were right. ``coverage`` is
    the share of response tokens that the draft vocabulary holds. speculators does not mask targets outside it, but
    takes the best token inside for the target, which the verifier never says: accuracies are too high there.
    """

    accuracies: tuple[float, ...]
    coverage: float

    @property
    def as_validated(self) -> float:
        """1 + a0 + a0 a1 + ...: what the accuracies come to as they are."""
        return chain_length(self.accuracies)

    @property
    def acceptance_length(self) -> float:
        """The same where no target outside the draft vocabulary is ever reached: what is to be compared with."""
        return chain_length(accuracy * self.coverage for accuracy in self.accuracies)

    def document(self, served: float) -> dict[str, Any]:
        """As it stands in the results, with the distance of the ``served`` acceptance length from it."""
        estimated = self.acceptance_length
        return {
            "acceptance_length": round(estimated, 4),
            "as_validated": round(self.as_validated, 4),
            "coverage": self.coverage,
            "positions": len(self.accuracies),
            "distance": round(served - estimated, 4),
            "relative_distance": round(served / estimated - 1, 4),
        }


def chain_length(accuracies: Iterable[float]) -> float:
    """Tokens a verify step: the verifier's own, and each draft token that is right with all before it."""
    length, chance = 1.0, 1.0
    for accuracy in accuracies:
        chance *= accuracy
        length += chance
    return length


def estimate_of(validation: Mapping[str, Any] | None, *, coverage: float, num_steps: int) -> Estimate | None:
    """The estimate for a chain of ``num_steps`` drafts, or as many as were trained; None without validation rows.

    Args:
        validation: the metrics that ``train`` records, ``cond_acc_<position>`` among them.
        coverage: share of response tokens inside the draft vocabulary.
        num_steps: draft tokens a verify step.
    """
    if validation is None:
        return None
    accuracies: list[float] = []
    while len(accuracies) < num_steps and (name := f"cond_acc_{len(accuracies)}") in validation:
        accuracies.append(float(validation[name]))
    return Estimate(tuple(accuracies), coverage) if accuracies else None
