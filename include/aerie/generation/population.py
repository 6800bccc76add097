"""A data set's ledger in memory: what is durable, what may start next, and whether the whole is sound."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from aerie.generation.budget import SUCCESSES, Counts, Limits, StopReason, decide
from aerie.generation.canary import (
    TRUNCATIONS,
    CanaryReport,
    RateWatch,
    alert_criteria,
    canary_criteria,
    choose_canary,
    common_reasons,
    quarantine_criterion,
)
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.reconciliation import JUDGED
from aerie.settings.pipeline import CanarySettings, GenerationSettings
from aerie.store.queries.ledger import LedgerRow

ERROR_WINDOW = 200
FEWEST_OUTCOMES = 20  # of the error window, before half of it means anything
FEWEST_OUTCOMES_AT_END = 8  # a few poisoned prompts that are left must not block a data set


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
    prompts may be tried: those of the canary, then the others in admission order. ``thinking`` says whether
    the verifier is asked to reason. ``regenerate`` are samples that somebody asked for again: they are generated
    whatever the budget has. ``alert`` takes a reason and a message when a rate passes its limit.
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
        thinking: bool,
        settings: GenerationSettings,
        alert: Callable[[str, str], None],
        regenerate: Collection[str] = (),
    ) -> None:
        self.rows = rows
        self.limits = limits
        usable = [prompt for prompt in prompts if prompt.skip_reason is None]
        chosen = choose_canary(usable, canary.prompts)
        leading = {prompt.sample_id for prompt in chosen}
        self.eligible = [*chosen, *(prompt for prompt in usable if prompt.sample_id not in leading)][:max_prompts]
        self.canary = self.eligible[: len(chosen)]
        self._asked_again = [
            prompt for prompt in usable if prompt.sample_id in regenerate and rows[prompt.sample_id].state == "pending"
        ]
        self.counts = _count(rows.values())
        self._fewest = min(canary.prompts, settings.quarantine_window)
        self._alert = alert
        self._criteria = canary_criteria(canary, about_tools=about_tools, thinking=thinking)
        self._quarantine = RateWatch([quarantine_criterion(settings)], settings.quarantine_window)
        self._rates = RateWatch(alert_criteria(self._criteria, settings), settings.quarantine_window)
        self._outcomes: deque[LedgerRow] = deque(maxlen=ERROR_WINDOW)
        self._failures = 0  # among these

    def pending(self) -> list[GenerationPrompt]:
        """Prompts that are still to be tried: the canary's, those asked for again, then in admission order."""
        ordered = chain(self.canary, self._asked_again, self.eligible)
        waiting = (prompt for prompt in ordered if self.rows[prompt.sample_id].state == "pending")
        return list({prompt.sample_id: prompt for prompt in waiting}.values())

    @cached_property
    def owed(self) -> frozenset[str]:
        """Samples that are generated whatever the budget has: those asked for again, and the canary before them."""
        canary = self.canary if self._asked_again else ()
        return frozenset(prompt.sample_id for prompt in (*canary, *self._asked_again))

    @property
    def canary_finished(self) -> bool:
        """Whether every prompt of the canary has come out."""
        return all(self.rows[prompt.sample_id].state in (*JUDGED, "failed") for prompt in self.canary)

    def report_canary(self) -> CanaryReport:
        """The canary's rows that have been judged, and what they are measured by."""
        rows = (self.rows[prompt.sample_id] for prompt in self.canary)
        return CanaryReport.of(self._criteria, [row for row in rows if row.state in JUDGED])

    def count_truncated(self) -> dict[str, int]:
        """How many judged rows the cap cut, by where it cut them; every place is named."""
        flags = Counter(flag for row in self.rows.values() if row.state in JUDGED for flag in row.flags)
        return {name: flags[name] for name in TRUNCATIONS}

    def count_states(self) -> Counter[str]:
        """How many rows are in each state."""
        return Counter(row.state for row in self.rows.values())

    def observe(self, row: LedgerRow) -> None:
        """Take note of how a sample came out, for ``trouble`` and alerts; it need not be durable yet."""
        if len(self._outcomes) == ERROR_WINDOW:
            self._failures -= self._outcomes[0].state == "failed"
        self._outcomes.append(row)
        self._failures += row.state == "failed"
        if row.state in JUDGED:
            self._quarantine.observe(row)
            self._rates.observe(row)
            self._alert_rates()

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
        return self._too_many_errors() or self._too_many_quarantined()

    def canary_trouble(self) -> Stop | None:
        """What the canary's finished rows say against going on."""
        failed = [row for prompt in self.canary if (row := self.rows[prompt.sample_id]).state == "failed"]
        report = self.report_canary()
        if len(report.judged) < len(failed):
            return _errors(failed, len(failed) + len(report.judged))
        return Stop("canary", report.refusal) if report.failures else None

    def conclude(self) -> Stop:
        """Why it stopped, when nothing is in flight and nothing more may start."""
        self._alert_rates(fewest=self._fewest)
        trouble = (
            self.canary_trouble()
            or self._too_many_errors(fewest=FEWEST_OUTCOMES_AT_END)
            or self._too_many_quarantined(fewest=self._fewest)
        )
        if trouble is not None:
            return trouble
        reached = decide(self.limits, self.counts).reached or "prompts_exhausted"
        return Stop(reached, self._describe(reached))

    def failed_lately(self) -> list[LedgerRow]:
        """Rows that failed among the latest outcomes."""
        return [row for row in self._outcomes if row.state == "failed"]

    def _too_many_errors(self, *, fewest: int = FEWEST_OUTCOMES) -> Stop | None:
        if len(self._outcomes) < fewest or self._failures * 2 <= len(self._outcomes):
            return None
        return _errors(self.failed_lately(), len(self._outcomes))

    def _too_many_quarantined(self, *, fewest: int | None = None) -> Stop | None:
        found = self._quarantine.failing(fewest=fewest)
        return Stop("quarantine_rate", f"lately {found[0]}: {common_reasons(self._outcomes)}") if found else None

    def _alert_rates(self, *, fewest: int | None = None) -> None:
        for measure in self._rates.newly_failing(fewest=fewest):
            self._alert(measure.criterion.name, f"lately {measure}; the run goes on")

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
            counts.generated_tokens -= row.completion_tokens or 0
        counts.generated_tokens += row.generated_tokens  # replaced responses too, of samples in any state
    return counts


def _errors(failed: Sequence[LedgerRow], outcomes: int) -> Stop:
    (kind, times), *_ = Counter(row.reasons[0] for row in failed if row.reasons).most_common(1)
    example = next(row for row in failed if row.reasons[:1] == (kind,))
    return Stop(
        "errors",
        f"{len(failed)} of the last {outcomes} samples failed; most often ({times} times) {kind}, for example "
        f"{example.sample_id} after {example.attempts} attempts: {example.detail}",
    )
