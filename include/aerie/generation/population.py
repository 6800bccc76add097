"""A data set's ledger in memory: what is durable, what may start next, and whether the whole is sound."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aerie.boundary.rules import POLICY_PREFIX
from aerie.generation.budget import SUCCESSES, Counts, Limits, StopReason, decide
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.reconciliation import JUDGED
from aerie.settings.pipeline import CanarySettings, GenerationSettings
from aerie.store.queries.ledger import LedgerRow

ERROR_WINDOW = 200
FEWEST_OUTCOMES = 20  # of the error window, before half of it means anything


@dataclass(frozen=True)
class Stop:
    """Why a data set stopped, and one line that says so."""

    reason: StopReason
    message: str

    @property
    def failed(self) -> bool:
        """Whether a person must look before it goes on."""
        return self.reason not in SUCCESSES


class Population:
    """A data set while it is generated.

    ``rows`` is the ledger by sample id; ``counts`` adds up its durable responses. ``max_prompts`` bounds how many
    prompts, in admission order, may be tried.
    """

    def __init__(
        self,
        prompts: Sequence[GenerationPrompt],
        rows: dict[str, LedgerRow],
        *,
        limits: Limits,
        max_prompts: int | None,
        canary: CanarySettings,
        about_tools: bool,
        settings: GenerationSettings,
    ) -> None:
        self.rows = rows
        self.limits = limits
        self.eligible = [prompt for prompt in prompts if prompt.skip_reason is None][:max_prompts]
        self.counts = _count(rows.values())
        self._canary = canary
        self._about_tools = about_tools
        self._settings = settings
        self._verdicts: deque[bool] = deque(maxlen=settings.quarantine_window)
        self._outcomes: deque[LedgerRow] = deque(maxlen=ERROR_WINDOW)

    def pending(self) -> list[GenerationPrompt]:
        """Prompts that are still to be tried, in admission order; those of the canary come first by nature."""
        return [prompt for prompt in self.eligible if self.rows[prompt.sample_id].state == "pending"]

    @property
    def canary(self) -> list[GenerationPrompt]:
        """The prompts that must pass before the rest is generated."""
        return self.eligible[: self._canary.prompts]

    def count_states(self) -> Counter[str]:
        """How many rows are in each state."""
        return Counter(row.state for row in self.rows.values())

    def observe(self, row: LedgerRow) -> None:
        """Take note of how a sample came out, for ``trouble``; it need not be durable yet."""
        self._outcomes.append(row)
        if row.state in JUDGED:
            self._verdicts.append(row.state == "quarantined")

    def record(self, row: LedgerRow) -> None:
        """Take in a row that is durable now."""
        self.rows[row.sample_id] = row
        if row.state in JUDGED:
            self.counts.add(
                kept=row.state == "kept",
                prompt_tokens=row.prompt_tokens or 0,
                response_tokens=row.completion_tokens or 0,
            )

    def trouble(self) -> Stop | None:
        """What stops the data set at once, seen in the latest outcomes."""
        full = len(self._verdicts) == self._verdicts.maxlen
        return self._too_many_errors() or (self._too_many_quarantined() if full else None)

    def canary_trouble(self) -> Stop | None:
        """What the canary's finished rows say against going on."""
        finished = [row for prompt in self.canary if (row := self.rows[prompt.sample_id]).state in (*JUDGED, "failed")]
        judged = [row for row in finished if row.state in JUDGED]
        if len(judged) * 2 < len(finished):
            return _errors([row for row in finished if row.state == "failed"], len(finished))
        if not judged:
            return None
        return self._corrupt_canary(judged) or self._toolless_canary(judged)

    def conclude(self) -> Stop:
        """Why it stopped, when nothing is in flight and nothing more may start."""
        trouble = self.canary_trouble() or self._too_many_errors()
        if trouble is None and len(self._verdicts) >= min(self._canary.prompts, self._settings.quarantine_window):
            trouble = self._too_many_quarantined()
        if trouble is not None:
            return trouble
        reached = decide(self.limits, self.counts).reached or "prompts_exhausted"
        return Stop(reached, self._describe(reached))

    def failed_lately(self) -> list[LedgerRow]:
        """Rows that failed among the latest outcomes."""
        return [row for row in self._outcomes if row.state == "failed"]

    def _too_many_errors(self) -> Stop | None:
        failed = self.failed_lately()
        if len(self._outcomes) < FEWEST_OUTCOMES or len(failed) * 2 <= len(self._outcomes):
            return None
        return _errors(failed, len(self._outcomes))

    def _too_many_quarantined(self) -> Stop | None:
        quarantined = sum(self._verdicts)
        share = quarantined / len(self._verdicts)
        if share <= self._settings.maximum_quarantine_share:
            return None
        return Stop(
            "quarantine_rate",
            f"{quarantined} of the last {len(self._verdicts)} responses were quarantined ({share:.0%}, at most "
            f"{self._settings.maximum_quarantine_share:.0%} allowed): {_common_reasons(self._outcomes)}",
        )

    def _corrupt_canary(self, judged: Sequence[LedgerRow]) -> Stop | None:
        corrupt = [row for row in judged if any(not reason.startswith(POLICY_PREFIX) for reason in row.reasons)]
        share = len(corrupt) / len(judged)
        if share <= self._canary.maximum_corrupt_share:
            return None
        return Stop(
            "canary",
            f"{len(corrupt)} of the first {len(judged)} responses are corrupt ({share:.0%}, at most "
            f"{self._canary.maximum_corrupt_share:.0%} allowed): {_common_reasons(corrupt)}",
        )

    def _toolless_canary(self, judged: Sequence[LedgerRow]) -> Stop | None:
        calling = sum(1 for row in judged if row.state == "kept" and row.tool_calls)
        share = calling / len(judged)
        if not self._about_tools or share >= self._canary.minimum_tool_share:
            return None
        return Stop(
            "canary",
            f"{calling} of the first {len(judged)} responses hold a well-formed tool call ({share:.0%}, at least "
            f"{self._canary.minimum_tool_share:.0%} expected of a data set about tools)",
        )

    def _describe(self, reached: StopReason) -> str:
        counts, limits = self.counts, self.limits
        total = counts.kept_response_tokens + counts.kept_prompt_tokens
        left = sum(1 for row in self.rows.values() if row.state == "pending")
        return {
            "budget": f"kept {counts.kept_response_tokens:,} response tokens of {limits.budget_tokens or 0:,} asked",
            "max_total_tokens": f"kept {total:,} tokens in all, of at most {limits.max_total_tokens or 0:,}",
            "max_samples": f"kept {counts.kept:,} samples of at most {limits.max_samples or 0:,}",
            "cost_ceiling": f"generated {counts.generated_tokens:,} tokens, kept or not, of at most "
            f"{limits.cost_ceiling_tokens or 0:,}, and kept only {counts.kept_response_tokens:,}",
            "prompts_exhausted": f"all {len(self.eligible):,} prompts that may be tried were"
            + (f"; {left:,} lie beyond max_prompts" if left else ""),
        }[reached]


def _count(rows: Iterable[LedgerRow]) -> Counts:
    counts = Counts()
    for row in rows:
        if row.state in JUDGED:
            counts.add(
                kept=row.state == "kept",
                prompt_tokens=row.prompt_tokens or 0,
                response_tokens=row.completion_tokens or 0,
            )
            counts.generated_tokens += row.generated_tokens - (row.completion_tokens or 0)
    return counts


def _errors(failed: Sequence[LedgerRow], outcomes: int) -> Stop:
    (kind, times), *_ = Counter(row.reasons[0] for row in failed if row.reasons).most_common(1)
    example = next(row for row in failed if row.reasons[:1] == (kind,))
    return Stop(
        "errors",
        f"{len(failed)} of the last {outcomes} samples failed; most often ({times} times) {kind}, for example "
        f"{example.sample_id} after {example.attempts} attempts: {example.detail}",
    )


def _common_reasons(rows: Iterable[LedgerRow]) -> str:
    reasons = Counter(reason for row in rows if row.state == "quarantined" for reason in row.reasons)
    return ", ".join(f"{reason} {times} times" for reason, times in reasons.most_common(3))
