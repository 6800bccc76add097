"""Counting what a stage could not use, and ending it when that is too much."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from aerie.errors import BadInput
from aerie.sources.conversation import Unusable
from aerie.stages import Events

EXAMPLES_PER_REASON = 3
PROGRESS_SECONDS = 3.0


class Tally:
    """Rows read, rows refused by reason with a few examples, rows set aside by rule, and repairs."""

    def __init__(self) -> None:
        self.rows = 0
        self.skipped: Counter[str] = Counter()
        self.set_aside: Counter[str] = Counter()
        self.repairs: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Tally":
        """The tally that ``as_document`` gave."""
        tally = cls()
        tally.rows, tally.examples = document["rows"], document["examples"]
        for counter in ("skipped", "set_aside", "repairs"):
            getattr(tally, counter).update(document[counter])
        return tally

    def as_document(self) -> dict[str, Any]:
        """All of it, to be kept as JSON."""
        return dict(vars(self))

    def skip(self, where: str, problem: Unusable) -> None:
        """Count one row that cannot be used, or that a rule sets aside."""
        counter = self.set_aside if problem.by_rule else self.skipped
        counter[problem.reason] += 1
        examples = self.examples.setdefault(problem.reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(f"{where}: {problem}"[:300])

    def describe(self) -> str:
        """One line for people: reasons, the most common first, each with an example."""
        if not self.skipped:
            return "none refused"
        return "; ".join(
            f"{n} {reason} (such as {self.examples[reason][0]})" for reason, n in self.skipped.most_common()
        )

    def check(self, source: str, max_skipped_share: float) -> None:
        """End the stage if too much was refused.

        Raises:
            BadInput: more than ``max_skipped_share`` of the rows that no rule sets aside were refused.
        """
        refused, rows = self.skipped.total(), self.rows - self.set_aside.total()
        if refused > max_skipped_share * rows:
            reason, count = self.skipped.most_common(1)[0]
            raise BadInput(
                f"{source}: {refused} of {rows} rows cannot be used, more than max_skipped_share "
                f"{max_skipped_share}; the most common reason is {reason} ({count} rows), such as "
                f"{self.examples[reason][0]}; correct the source, its 'reader', or the share"
            )


class Progress:
    """Progress events, one every few seconds however fast the rows come."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._last = time.monotonic()

    def tick(self, describe: Callable[[], tuple[str, dict[str, Any]]]) -> None:
        """Report ``describe()``, a line and its figures, if the last report is some seconds ago."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS:
            self._last = now
            message, figures = describe()
            self._events.progress(message, **figures)
