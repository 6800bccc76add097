"""May another request start now? The budget's decision, over what has arrived and what is running."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from aerie.generation.budget import Counts, InFlight, Limits, decide
from aerie.generation.lengths import Forecast, LengthEstimator


@dataclass(frozen=True)
class Started:
    """A request that runs: its prompt's tokens, its cap (tokens), and when it started (seconds)."""

    prompt_tokens: int
    max_new_tokens: int
    at: float


class Admission:
    """Keeps track of running requests; times are seconds of any clock that only goes forward.

    ``durable`` are the counts at the start, ``earlier`` the lengths (tokens) of answers of earlier runs. What has
    arrived counts at once: the disk decides what is complete, but what may start need not wait for it.
    """

    def __init__(self, limits: Limits, durable: Counts, *, cap: int, earlier: Iterable[int] = ()) -> None:
        self._limits = limits
        self._arrived = replace(durable)
        self._lengths = LengthEstimator(cap, earlier)
        self._running: dict[str, Started] = {}
        self._prompt_tokens = 0  # of what runs, as the next
        self._most_tokens = 0

    def started(self, sample_id: str, *, prompt_tokens: int, max_new_tokens: int, at: float) -> None:
        """A request began."""
        self._running[sample_id] = Started(prompt_tokens, max_new_tokens, at)
        self._prompt_tokens += prompt_tokens
        self._most_tokens += max_new_tokens

    def arrived(self, sample_id: str, *, response_tokens: int, kept: bool, at: float) -> None:
        """A request was answered."""
        started = self.ended(sample_id)
        self._lengths.finished(response_tokens, at - started.at)
        self._arrived.add(kept=kept, prompt_tokens=started.prompt_tokens, response_tokens=response_tokens)

    def ended(self, sample_id: str) -> Started:
        """A request ended, with or without an answer."""
        started = self._running.pop(sample_id)
        self._prompt_tokens -= started.prompt_tokens
        self._most_tokens -= started.max_new_tokens
        return started

    def may_start(self, now: float, *, owed: bool = False) -> bool:
        """Whether another request may start; one that is ``owed`` asks the cost ceiling alone."""
        limits = self._limits.cost_only if owed else self._limits
        worst = Forecast(float(self._most_tokens), 0.0)
        # Far from the limits the worst case has room too, and costs little to know.
        if decide(limits, self._arrived, InFlight(len(self._running), self._prompt_tokens, worst)).start:
            return True
        return decide(limits, self._arrived, self.expect(now)).start

    def expect(self, now: float) -> InFlight:
        """What is expected of the requests that run."""
        ages = self._lengths.ages([now - started.at for started in self._running.values()])
        return InFlight(len(ages), self._prompt_tokens, self._lengths.distribution(ages).forecast(ages))
