"""How long running requests will become, from those that have finished and those that have not.

Finished requests alone mislead: long answers are still running while short ones are counted (the reference run's mean
rose from 1,416 to 1,577 tokens). The running ones are therefore counted as what they are, censored observations, in a
Kaplan-Meier estimate of the distribution of lengths; what a request still has to go is that distribution's mean
residual life at its age. No answer is longer than the cap, so what has never been seen is taken to reach it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

REMEMBERED_LENGTHS = 1024
LEAST_PROBABILITY = 1e-9  # of reaching the cap, so that a request older than any that finished has a forecast

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """Expected tokens and their variance (tokens squared)."""

    mean: float
    variance: float


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths that answers take (tokens, ascending, float64 [n]) and the probability of each (float64 [n])."""

    lengths: Floats
    probabilities: Floats

    def forecast(self, ages: Sequence[float]) -> Forecast:
        """Sum of the final lengths of independent requests that have reached ``ages`` (tokens)."""
        if not len(ages):
            return Forecast(0.0, 0.0)
        reached = np.asarray(ages, dtype=np.float64)
        # Suffix sums of probability, length and squared length: what lies beyond each length.
        moments = np.stack([self.lengths**power * self.probabilities for power in (0, 1, 2)])
        beyond = np.concatenate([np.cumsum(moments[:, ::-1], axis=1)[:, ::-1], np.zeros((3, 1))], axis=1)
        at = np.minimum(np.searchsorted(self.lengths, reached, side="right"), len(self.lengths) - 1)
        share, first, second = beyond[:, at]
        mean = np.maximum(first / share, reached)
        variance = np.maximum(second / share - (first / share) ** 2, 0.0)
        return Forecast(float(mean.sum()), float(variance.sum()))


class LengthEstimator:
    """Estimates the lengths of answers, in tokens, none longer than ``cap``; ``earlier`` runs give it a start."""

    def __init__(self, cap: int, earlier: Iterable[int] = ()) -> None:
        self._cap = float(cap)
        self._finished: deque[float] = deque(map(float, earlier), maxlen=REMEMBERED_LENGTHS)
        self._seconds = 0.0
        self._tokens = 0.0

    def finished(self, tokens: int, seconds: float) -> None:
        """Take in an answer of ``tokens`` that took ``seconds``."""
        self._finished.append(float(tokens))
        self._tokens += tokens
        self._seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate of one request, 0 before anything has finished: ages then count as nothing."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def ages(self, seconds: Sequence[float]) -> list[float]:
        """Tokens that requests running for ``seconds`` have likely reached, always below the cap."""
        return [min(waited * self.tokens_per_second, self._cap - 1) for waited in seconds]

    def distribution(self, running: Sequence[float]) -> LengthDistribution:
        """Kaplan-Meier estimate from finished lengths and the ages (tokens) of running requests."""
        finished = np.asarray(self._finished, dtype=np.float64)
        everything = np.sort(np.concatenate([finished, np.asarray(running, dtype=np.float64)]))
        lengths, deaths = np.unique(finished, return_counts=True)
        at_risk = len(everything) - np.searchsorted(everything, lengths, side="left")
        survival = np.concatenate([[1.0], np.cumprod(1.0 - deaths / at_risk)]) if len(lengths) else np.ones(1)
        probabilities = np.append(survival[:-1] - survival[1:], max(survival[-1], LEAST_PROBABILITY))
        return LengthDistribution(np.append(lengths, max(self._cap, lengths[-1] if len(lengths) else 0)), probabilities)
