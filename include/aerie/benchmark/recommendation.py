"""Which of several draft settings to serve with."""

from collections.abc import Sequence
from dataclasses import dataclass

from aerie.settings.pipeline import DraftSettings

TIE = 0.01
RULE = (
    f"the highest tokens/s; within {TIE:.0%} of it the highest acceptance length, then the fewest draft tokens; never "
    "one that changed the verifier's greedy output"
)


NONE_SOUND = f"{RULE}: each that was tried here did, so that none is recommended"
ONE_ALONE = "the configured draft setting: benchmark.sweep names no other to compare with"


@dataclass(frozen=True)
class Tried:
    """A draft setting as it was measured; ``different_outputs`` counts prompts whose output may not differ, but did."""

    setting: DraftSettings
    tokens_per_second: float
    acceptance_length: float | None
    different_outputs: int


def recommend(tried: Sequence[Tried]) -> Tried | None:
    """The setting that ``RULE`` recommends; None where every one changed the output.

    Args:
        tried: settings measured on the same prompts, with as many requests at once.
    """
    sound = [one for one in tried if not one.different_outputs]
    if not sound:
        return None
    fastest = max(one.tokens_per_second for one in sound)
    level = [one for one in sound if one.tokens_per_second >= fastest * (1 - TIE)]
    return max(level, key=lambda one: (one.acceptance_length or 0.0, -one.setting.num_draft_tokens))
