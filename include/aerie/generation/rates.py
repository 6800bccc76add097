"""How fast something grows, and how sure that is."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev

INTERVALS = 120  # of progress lines: with one every ten seconds, the last twenty minutes
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Span:
    """Seconds that something will take: the expectation and what it will likely lie between; infinite if unknown."""

    low: float
    expected: float
    high: float

    def earlier(self, other: "Span") -> "Span":
        """When the first of two things ends."""
        return Span(min(self.low, other.low), min(self.expected, other.expected), min(self.high, other.high))


NEVER = Span(math.inf, math.inf, math.inf)


class GrowthRate:
    """The rate of a count, from its growth over the latest intervals between two looks at it."""

    def __init__(self, value: float, at_seconds: float) -> None:
        self._value = value
        self._at = at_seconds
        self._rates: deque[float] = deque(maxlen=INTERVALS)

    def look(self, value: float, at_seconds: float) -> None:
        """Take note of the count."""
        if at_seconds > self._at:
            self._rates.append((value - self._value) / (at_seconds - self._at))
            self._value, self._at = value, at_seconds

    def seconds_for(self, amount: float) -> Span:
        """How long it takes to grow by ``amount``: the rate's mean, and two of its standard errors either side."""
        if amount <= 0:
            return Span(0.0, 0.0, 0.0)
        mean = fmean(self._rates) if self._rates else 0.0
        error = STANDARD_ERRORS * stdev(self._rates) / math.sqrt(len(self._rates)) if len(self._rates) > 1 else 0.0
        low, expected, high = (amount / rate if rate > 0 else math.inf for rate in (mean + error, mean, mean - error))
        return Span(low, expected, high)
