"""The canary: a few prompts that must come out well before a data set is generated in full, and the same rates later.

Which prompts: the first ``PROMPTS_PER_STRATUM`` times as many in admission order, sorted by length and cut into as many
strata as the canary has prompts; each stratum gives the length of the one that was admitted first, and the canary takes
the earliest prompts of those lengths. So it spans short and long prompts, and depends on ids, lengths and the seeded
order alone: resuming, raising ``max_prompts`` or a budget leaves it as it is. Every prompt of that window has the same
chance to be in it, and the canary only moves to the front of the admission order: whatever a cap then leaves out, it
prefers no length. Beyond the window the sample is the first prompts in admission order, as without a canary.

Before the full run a criterion that is not met stops the data set. During the run the same rates are taken over the
latest responses: too many quarantined ones stop it, any other rate raises one alert.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from aerie.boundary.rules import POLICY_PREFIX
from aerie.generation.prompts import GenerationPrompt
from aerie.settings.pipeline import CanarySettings, GenerationSettings
from aerie.store.queries.ledger import LedgerRow

PROMPTS_PER_STRATUM = 4
TRUNCATIONS = ("truncated_in_reasoning", "truncated_in_answer", "truncated_in_tool_call")
_TRUNCATIONS = frozenset(TRUNCATIONS)
REASONS_NAMED = 5


def choose_canary(prompts: Sequence[GenerationPrompt], count: int) -> list[GenerationPrompt]:
    """The canary of prompts in admission order: at most ``count``, across lengths, in admission order."""
    window = prompts[: count * PROMPTS_PER_STRATUM]
    strata = min(count, len(window))
    # Among equal lengths the order must know nothing of admission, else the strata's edges would prefer some.
    by_length = sorted(window, key=lambda prompt: (len(prompt.prompt_ids), _digest(prompt.sample_id)))
    edges = [number * len(window) // strata for number in range(strata + 1)] if strata else []
    wanted = Counter(len(min(by_length[start:stop], key=_admission).prompt_ids) for start, stop in pairwise(edges))
    chosen = []
    for prompt in window:
        length = len(prompt.prompt_ids)
        if wanted[length]:
            wanted[length] -= 1
            chosen.append(prompt)
    return chosen


def _digest(sample_id: str) -> bytes:
    return hashlib.sha256(sample_id.encode()).digest()


def _admission(prompt: GenerationPrompt) -> tuple[int, str]:
    return prompt.admission_rank, prompt.sample_id


@dataclass(frozen=True)
class Criterion:
    """A share of judged responses with a bound: ``limit`` at most, or at least where ``lower`` says so.

    ``what`` completes "3 of 32 responses"; ``setting`` names the limit for whoever wants another.
    """

    name: str
    what: str
    counts: Callable[[LedgerRow], bool]
    limit: float
    setting: str
    lower: bool = False

    def fails(self, count: int, responses: int) -> bool:
        """Whether ``count`` of so many responses break the bound; nothing is said of no responses."""
        if not responses:
            return False
        share = count / responses
        return share < self.limit if self.lower else share > self.limit

    def measure(self, rows: Iterable[LedgerRow]) -> "Measure":
        """The share among ``rows``."""
        found = [self.counts(row) for row in rows]
        return Measure(self, sum(found), len(found))


@dataclass(frozen=True)
class Measure:
    """A criterion's count among a number of judged responses."""

    criterion: Criterion
    count: int
    responses: int

    @property
    def share(self) -> float:
        """Share of the responses, 0 where there is none."""
        return self.count / self.responses if self.responses else 0.0

    @property
    def failed(self) -> bool:
        """Whether the bound is broken."""
        return self.criterion.fails(self.count, self.responses)

    def __str__(self) -> str:
        bound = "at least" if self.criterion.lower else "at most"
        return (
            f"{self.count} of {self.responses} responses {self.criterion.what} ({self.share:.1%}, {bound} "
            f"{self.criterion.limit:.1%} by {self.criterion.setting})"
        )


def is_corrupt(row: LedgerRow) -> bool:
    """Whether a row is quarantined for what it is, and not by a data set's policy alone."""
    return any(not reason.startswith(POLICY_PREFIX) for reason in row.reasons)


def is_truncated(row: LedgerRow) -> bool:
    """Whether the cap cut a row."""
    return not _TRUNCATIONS.isdisjoint(row.flags)


def _is_short(row: LedgerRow, tokens: int) -> bool:
    """Whether little but reasoning was written, tags and end token counted, where the row came to its own end."""
    written = (row.completion_tokens or 0) - (row.reasoning_tokens or 0)
    return written <= tokens and not row.tool_calls and not is_truncated(row)


def _has_tool_section(row: LedgerRow) -> bool:
    return bool(row.tool_calls) and not is_corrupt(row) and "truncated_in_tool_call" not in row.flags


def canary_criteria(settings: CanarySettings, *, about_tools: bool, thinking: bool) -> tuple[Criterion, ...]:
    """What the canary is measured by: reasoning only where ``thinking`` is on, tool sections of data about tools."""
    short = settings.short_answer_tokens
    criteria = [
        Criterion(
            "corrupt", "are corrupt", is_corrupt, settings.maximum_corrupt_share, "canary.maximum_corrupt_share"
        ),
        Criterion(
            "truncated", "were cut by max_new_tokens", is_truncated, settings.maximum_truncated_share,
            "canary.maximum_truncated_share",
        ),
        Criterion(
            "loops", "repeat themselves without end", lambda row: "loop" in row.reasons, settings.maximum_loop_share,
            "canary.maximum_loop_share",
        ),
        Criterion(
            "short_answers", f"hold at most {short} tokens besides their reasoning", lambda row: _is_short(row, short),
            settings.maximum_short_answer_share, "canary.maximum_short_answer_share",
        ),
    ]  # fmt: skip
    if thinking:
        criteria.append(
            Criterion(
                "empty_reasoning", "have no reasoning",
                lambda row: not row.reasoning_tokens or "empty_reasoning" in row.reasons,
                settings.maximum_empty_reasoning_share, "canary.maximum_empty_reasoning_share",
            )
        )  # fmt: skip
    if about_tools:
        criteria.append(
            Criterion(
                "tool_sections", "hold a well-formed tool section", _has_tool_section, settings.minimum_tool_share,
                "canary.minimum_tool_share", lower=True,
            )
        )  # fmt: skip
    return tuple(criteria)


def quarantine_criterion(settings: GenerationSettings) -> Criterion:
    """The rate that stops a run."""
    return Criterion(
        "quarantined", "were quarantined", lambda row: row.state == "quarantined", settings.maximum_quarantine_share,
        "generation.maximum_quarantine_share",
    )  # fmt: skip


def alert_criteria(canary: Iterable[Criterion], settings: GenerationSettings) -> tuple[Criterion, ...]:
    """What is watched besides the quarantine rate, which has the corrupt rows: truncation has a limit of its own."""
    return tuple(
        replace(criterion, limit=settings.alert_truncated_share, setting="generation.alert_truncated_share")
        if criterion.name == "truncated"
        else criterion
        for criterion in canary
        if criterion.name != "corrupt"
    )


@dataclass(frozen=True)
class CanaryReport:
    """How the canary came out: the rows that were judged, and the criteria over them."""

    judged: tuple[LedgerRow, ...]
    measures: tuple[Measure, ...]

    @classmethod
    def of(cls, criteria: Iterable[Criterion], judged: Sequence[LedgerRow]) -> "CanaryReport":
        """Measure rows that were judged."""
        return cls(tuple(judged), tuple(criterion.measure(judged) for criterion in criteria))

    @property
    def failures(self) -> tuple[Measure, ...]:
        """The criteria that are not met."""
        return tuple(measure for measure in self.measures if measure.failed)

    @property
    def mean_completion_tokens(self) -> float:
        """Mean length of the responses, in tokens."""
        return sum(row.completion_tokens or 0 for row in self.judged) / max(len(self.judged), 1)

    @property
    def shares(self) -> str:
        """Every criterion's share, for a line of a log."""
        return ", ".join(f"{measure.criterion.name} {measure.share:.1%}" for measure in self.measures)

    @property
    def refusal(self) -> str:
        """Why the data set must not be generated, and what to do about it."""
        failed = "; ".join(map(str, self.failures))
        return (
            f"{failed}. Reasons: {common_reasons(self.judged)}. Read the decoded samples (in this log, or ./aerie "
            "quarantine show SAMPLE). What affects tokens (template, sampling, max_new_tokens) is mended in a new "
            "edition; where the server was at fault, ./aerie quarantine regenerate has these samples sent again; where "
            "the verifier is rightly so, change the limit named"
        )

    def samples(self) -> list[LedgerRow]:
        """Up to three rows for people to read: one kept, one quarantined or flagged, the longest; each once."""
        candidates = [
            next((row for row in self.judged if row.state == "kept" and not row.flags), None),
            next((row for row in self.judged if row.state == "quarantined"), None)
            or next((row for row in self.judged if row.flags), None),
            *sorted(self.judged, key=lambda row: row.completion_tokens or 0, reverse=True),
        ]
        chosen = {row.sample_id: row for row in candidates if row is not None}
        return list(chosen.values())[:3]


def common_reasons(rows: Iterable[LedgerRow]) -> str:
    """The commonest reasons and flags of judged rows."""
    names = Counter(name for row in rows for name in (*row.reasons, *row.flags))
    return ", ".join(f"{name} {times} times" for name, times in names.most_common(REASONS_NAMED)) or "none"


class RateWatch:
    """Shares over the latest ``window`` responses."""

    def __init__(self, criteria: Sequence[Criterion], window: int) -> None:
        self._criteria = criteria
        self._window: deque[tuple[bool, ...]] = deque(maxlen=window)
        self._size = window
        self._counts = [0] * len(criteria)
        self._reported: set[str] = set()

    def observe(self, row: LedgerRow) -> None:
        """Take in one judged response."""
        if len(self._window) == self._size:
            self._add(self._window[0], -1)
        found = tuple(criterion.counts(row) for criterion in self._criteria)
        self._window.append(found)
        self._add(found, 1)

    def _add(self, found: tuple[bool, ...], sign: int) -> None:
        for index, counted in enumerate(found):
            if counted:
                self._counts[index] += sign

    def failing(self, *, fewest: int | None = None) -> list[Measure]:
        """Criteria that fail now; none before there are ``fewest`` responses, by default a full window."""
        responses = len(self._window)
        if responses < (self._size if fewest is None else fewest):
            return []
        counted = zip(self._criteria, self._counts, strict=True)
        return [
            Measure(criterion, count, responses) for criterion, count in counted if criterion.fails(count, responses)
        ]

    def newly_failing(self, *, fewest: int | None = None) -> list[Measure]:
        """The same, but each criterion only the first time."""
        found = [measure for measure in self.failing(fewest=fewest) if measure.criterion.name not in self._reported]
        self._reported.update(measure.criterion.name for measure in found)
        return found
