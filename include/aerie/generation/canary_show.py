"""What people see of a canary: one line with its shares and what the whole will take, and three decoded samples.

The samples are for people only, and the rest is generated while they are decoded: when that fails it is said, once, and
generation goes on.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aerie.artefacts.previews import Preview, write_previews
from aerie.artefacts.response_log import Response, read_latest
from aerie.errors import AerieError
from aerie.generation.budget import decide
from aerie.generation.canary import CanaryReport
from aerie.generation.decoding import decode, preview_lines
from aerie.generation.population import Population
from aerie.generation.reporting import Reporter
from aerie.generation.retiming import retime, timeline_figures, timeline_line
from aerie.settings.machine import database_url
from aerie.stages import Events, StageRequest
from aerie.store.connection import connected
from aerie.store.queries.previews import load_previews


class CanaryShow:
    """Shows the canary of the request's data set when it has finished. ``tasks`` are those that still decode."""

    def __init__(self, request: StageRequest, events: Events, population: Population, reporter: Reporter) -> None:
        self._request = request
        self._events = events
        self._population = population
        self._reporter = reporter
        self._files = request.files.dataset(str(request.dataset))
        self.tasks: list[asyncio.Task[None]] = []

    def show(self) -> None:
        """Say how the canary came out, and have its samples decoded."""
        report = self._population.report_canary()
        if not report.judged:
            return
        figures = self._reporter.figures()
        tokens_per_second = float(figures["tokens_per_second"] or 0.0)
        self._events.progress(canary_line(report, self._population, tokens_per_second=tokens_per_second))
        if self._population.canary_trouble() is None:
            self._retime(figures)
        self.tasks.append(asyncio.create_task(self._show_samples(report)))

    def _retime(self, figures: Mapping[str, Any]) -> None:
        dataset = str(self._request.dataset)
        timeline = retime(self._request, figures)
        hours = timeline_figures(timeline, dataset)
        self._events.progress(timeline_line(timeline, dataset), **hours)
        self._reporter.retime(hours)

    def show_if_it_was_not(self) -> None:
        """The same, where an earlier run ended between the canary and its samples."""
        if self._population.canary_finished and not self._files.canary_previews.exists():
            self.show()

    async def shown(self) -> None:
        """Wait until the samples are shown."""
        await asyncio.gather(*self.tasks)

    async def _show_samples(self, report: CanaryReport) -> None:
        try:
            responses = await asyncio.to_thread(self._read, [row.sample_id for row in report.samples()])
            previews = await decode(self._request, responses)
            await asyncio.to_thread(self._keep, previews)
        except (AerieError, OSError) as error:
            message = f"the canary's samples cannot be shown as text: {error}; generation goes on"
            self._events.progress(message)
            self._events.alert("samples_not_decoded", message)
            return
        self._events.block("Samples of the canary", sample_lines(previews))

    def _read(self, sample_ids: Sequence[str]) -> list[Response]:
        read = read_latest(self._files.responses, sample_ids)
        return [read[name] for name in sample_ids]

    def _keep(self, previews: Sequence[Preview]) -> None:
        write_previews(self._files.canary_previews, previews)
        # The driver's connection is in the middle of its own transactions.
        with connected(database_url(), application="aerie canary") as connection:
            load_previews(
                connection, edition=self._request.edition, dataset=str(self._request.dataset), source="canary",
                previews=(preview.model_dump(mode="json") for preview in previews),
            )  # fmt: skip


def sample_lines(previews: Sequence[Preview]) -> Iterable[str]:
    """Decoded samples as lines of a log."""
    for number, preview in enumerate(previews, start=1):
        first, *others = preview_lines(preview)
        yield f"Sample {number} of {len(previews)}: {first}"
        yield from others


def canary_line(report: CanaryReport, population: Population, *, tokens_per_second: float) -> str:
    """How the canary came out, and what the rest will take at the rate so far."""
    mean = report.mean_completion_tokens
    passed = population.canary_trouble() is None
    failed = len(population.canary) - len(report.judged)
    head = (
        f"canary {'passed' if passed else 'did not pass'}: {len(report.judged)} responses, "
        f"{f'{failed} failed requests, ' if failed else ''}{report.shares}; mean {mean:,.0f} tokens"
    )
    if not passed:
        return head
    remaining = decide(population.limits, population.counts).remaining_tokens
    wanted = f"the {remaining or 0:,} response tokens that the budget still asks for"
    kept_share = population.counts.kept_share
    if remaining is None:
        left = len(population.eligible) - len(population.canary)
        remaining, kept_share = round(left * mean), 1.0
        wanted = f"the {left:,} prompts that are left, about {remaining:,} tokens"
    if tokens_per_second <= 0:
        return f"{head}; no rate yet for {wanted}"
    seconds = remaining / kept_share / tokens_per_second
    return f"{head}, {tokens_per_second:,.0f} tok/s; at this rate {_duration(seconds)} for {wanted}"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"
