"""One benchmark of an exported drafter: which servers are measured under which loads."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.manifest import Manifest
from aerie.benchmark.losslessness import BATCH_SIZES, Losslessness, Parting, Share, judge
from aerie.benchmark.measurement import MeasuredServer, Measurement, Wanted, measure_missing
from aerie.benchmark.measures import Divergence, Runs, divergences, of_prompts, pooled, tokens_per_second
from aerie.benchmark.production import Production, drafter_in_production, published_drafters
from aerie.benchmark.recommendation import Tried
from aerie.benchmark.requests import GREEDY, Held, Load, held_out_prompts, prompts_of_file
from aerie.benchmark.server import (
    NOT_MEASURED,
    ServerFacts,
    benchmark_server,
    most_likely,
    require_drafter,
    verifier_identity,
)
from aerie.errors import BadInput
from aerie.settings.pipeline import BenchmarkSettings, DraftSettings, PipelineSettings
from aerie.settings.profile import Sampling
from aerie.stages import Events, StageRequest

BENCHMARK_VERSION = 2
"""Raised when the same server and prompts would be measured otherwise."""

GREEDY_ON_CPU = "SGLang verifies drafts greedily on a CPU, whatever the temperature"

UNTRAINED_SHARE = 4
UNTRAINED_NEW_TOKENS = 64
"""The untrained drafter makes every token slower and proves one number: it gets one prompt in four, cut short."""


def require_sampling(settings: PipelineSettings) -> None:
    """Refuse to measure acceptance at a temperature where it would be that of greedy verification.

    Raises:
        BadInput: the configuration asks for it on a CPU.
    """
    if settings.benchmark.sampled and settings.serving.device == "cpu":
        raise BadInput(f"benchmark.sampled is true, but serving.device is cpu: {GREEDY_ON_CPU}; leave it out")


def prompts_to_send(request: StageRequest) -> list[Held]:
    """Held-out prompts of the edition, then those of the user's own files.

    Raises:
        BadInput: there are no held-out prompts, or a file is not one of prompts.
    """
    held = held_out_prompts(request.settings, request.files)
    stops = held[0].stop_token_ids
    own = (
        prompts_of_file(path, request.settings, stop_token_ids=stops)
        for path in request.settings.benchmark.prompts_files
    )
    return [*held, *own]


@dataclass(frozen=True)
class Measured:
    """What was measured, by concurrency, and how the outputs with the drafter compare with those without.

    ``sampled`` is at the sampling of generation, at the first concurrency; all else is greedy. ``tried`` are the draft
    settings that a recommendation is chosen from, on fewer prompts.
    """

    untrained: Measurement | None
    trained: Mapping[int, Measurement]
    sampled: Measurement | None
    without: Mapping[int, Measurement]
    tried: Sequence[Tried]
    production: Production
    lossless: Losslessness


@dataclass(frozen=True)
class Served:
    """A server to measure: without a drafter (None), or with one at a draft setting."""

    drafter: Path | None
    drafting: DraftSettings


@dataclass(frozen=True)
class Bench:
    """One benchmark: the exported drafter, the prompts, and where measurements are kept."""

    request: StageRequest
    exported: Manifest
    held: Sequence[Held]
    events: Events

    @property
    def asked(self) -> BenchmarkSettings:
        """Settings of the benchmark."""
        return self.request.settings.benchmark

    @property
    def exact(self) -> bool:
        """Whether outputs must be identical: float32 leaves no rounding to explain a difference."""
        return self.request.settings.verifier.dtype == "float32"

    @property
    def sampling(self) -> Sampling | None:
        """The sampling of generation, where acceptance is measured at it too."""
        on_gpu = self.request.settings.serving.device != "cpu"
        wanted = on_gpu if self.asked.sampled is None else self.asked.sampled
        return self.request.settings.load_sampling() if wanted else None

    @property
    def fewer(self) -> list[Held]:
        """The prompts that draft settings are compared on."""
        return [one.first(self.asked.sweep_prompts_per_dataset) for one in self.held]

    def measure(self) -> Measured:
        """Measure everything, the plain verifier last: it is asked about differences while it still runs.

        Raises:
            Failed, Retryable: as ``benchmark``.
        """
        untrained = self._untrained() if self.asked.compare_untrained else None
        trained, sampled, swept = self._trained()
        swept += [(setting, self._swept(setting)) for setting in self.asked.sweep if setting != self.asked.drafting]
        production = self._production()
        without = self._without()
        own = without[self.asked.concurrency[0]].runs
        return Measured(
            untrained=untrained,
            trained=trained,
            sampled=sampled,
            without=without,
            tried=[self._tried(setting, own, one.runs) for setting, one in swept],
            production=production,
            lossless=self._losslessness(trained, without),
        )

    def _losslessness(self, trained: Mapping[int, Measurement], without: Mapping[int, Measurement]) -> Losslessness:
        """Judge the outputs with the drafter, at every concurrency, against those without."""
        partings = [
            parting
            for number, with_it in trained.items()
            for parting in self._partings(without[number].runs, with_it.runs)
        ]
        compared = sum(len(run.requests) for one in trained.values() for run in one.runs.values())
        between = None
        if not self.exact:
            small, large = (without[size].runs for size in BATCH_SIZES)
            between = Share(len(divergences(small, large)), sum(len(run.requests) for run in large.values()))
        return judge(partings, compared=compared, exact=self.exact, between_batch_sizes=between)

    def _tried(self, setting: DraftSettings, own: Runs, runs: Runs) -> Tried:
        """A draft setting as it was measured; outputs that part at a tie are not different."""
        partings = self._partings(of_prompts(own, runs), runs)
        return Tried(
            setting=setting,
            tokens_per_second=tokens_per_second(runs.values()),
            acceptance_length=pooled(runs.values()),
            different_outputs=sum(not parting.is_tie for parting in partings),
        )

    def _partings(self, own: Runs, other: Runs) -> list[Parting]:
        """Where outputs part, with what the plain verifier holds likely there, where rounding may explain it."""
        found = divergences(own, other)
        if self.exact or not found:
            return [Parting(one, None) for one in found]
        with self._open(Served(None, self.asked.drafting)) as url:
            return [Parting(one, most_likely(url, self._before(own, one))) for one in found]

    def _before(self, own: Runs, parting: Divergence) -> list[int]:
        """Token ids of the prompt, and of the verifier's own output before it parts."""
        prompts = {(one.dataset, prompt.sample_id): prompt for one in self.held for prompt in one.prompts}
        prompt = prompts[parting.dataset, parting.sample_id]
        requests = own[parting.dataset].requests
        output = next(request.output_ids for request in requests if request.sample_id == parting.sample_id)
        return [*prompt.prompt_ids, *output[: parting.position]]

    @property
    def measured_as(self) -> str:
        """What an acceptance length here depends on, besides the drafter."""
        served = Served(None, self.asked.drafting)
        plain = self._wanted("", served, self.held, self.asked.concurrency[0])
        return fingerprint_of({"plain": plain.key, "drafting": served.drafting.model_dump()})

    def _production(self) -> Production:
        """The drafter in production on these prompts; served and measured where that is not known."""
        if self.asked.minimum_share_of_production == 0:
            return Production("benchmark.minimum_share_of_production is 0")
        try:
            drafters = published_drafters()
        except BadInput as without_database:
            return Production(f"the registry cannot be asked: {without_database}")
        settings = self.request.settings
        found = drafter_in_production(
            drafters,
            verifier=verifier_identity(settings.verifier.path),
            drafter_fingerprint=self.exported.fingerprint,
            measured_as=self.measured_as,
            published=settings.publish.folder,
        )
        if found.folder is None:
            return found
        served = Served(found.folder.resolve(), self.asked.drafting)
        wanted = self._wanted("production", served, self.held, self.asked.concurrency[0])
        length = pooled(self._measure(served, [wanted])[0].runs.values())
        said = "each of its answers here was one token long" if length is None else found.said
        return replace(found, acceptance_length=length, said=said)

    def _untrained(self) -> Measurement:
        held = [one.first(max(1, len(one.prompts) // UNTRAINED_SHARE)) for one in self.held]
        tokens = min(self.asked.max_new_tokens, UNTRAINED_NEW_TOKENS)
        served = Served(self.request.files.untrained_drafter.resolve(), self.asked.drafting)
        wanted = self._wanted("untrained", served, held, self.asked.concurrency[0], max_new_tokens=tokens, apart=False)
        return self._measure(served, [wanted])[0]

    def _trained(
        self,
    ) -> tuple[dict[int, Measurement], Measurement | None, list[tuple[DraftSettings, Measurement]]]:
        """By concurrency; sampled, where that is measured; and on the prompts of the sweep, where there is one."""
        served = Served(self.request.files.drafter.resolve(), self.asked.drafting)
        numbers = self.asked.concurrency
        wanted = {
            f"trained-{number}": self._wanted(f"trained-{number}", served, self.held, number) for number in numbers
        }
        sampling = self.sampling
        if sampling is not None:
            wanted["sampled"] = self._wanted("sampled", served, self.held, numbers[0], sampling=sampling)
        if self.asked.sweep:
            name = _sweep_name(served.drafting)
            wanted["sweep"] = self._wanted(name, served, self.fewer, numbers[0], apart=False)
        measured = dict(zip(wanted, self._measure(served, list(wanted.values())), strict=True))
        tried = [(served.drafting, measured["sweep"])] if self.asked.sweep else []
        return {number: measured[f"trained-{number}"] for number in numbers}, measured.get("sampled"), tried

    def _swept(self, drafting: DraftSettings) -> Measurement:
        served = Served(self.request.files.drafter.resolve(), drafting)
        name = _sweep_name(drafting)
        return self._measure(served, [self._wanted(name, served, self.fewer, self.asked.concurrency[0], apart=False)])[
            0
        ]

    def _without(self) -> dict[int, Measurement]:
        """By concurrency; where outputs may part, also at the batch sizes between which the verifier's own do."""
        served = Served(None, self.asked.drafting)
        numbers = tuple(dict.fromkeys((*self.asked.concurrency, *(() if self.exact else BATCH_SIZES))))
        wanted = [self._wanted(f"without-{number}", served, self.held, number) for number in numbers]
        return dict(zip(numbers, self._measure(served, wanted), strict=True))

    def _wanted(
        self, name: str, served: Served, held: Sequence[Held], concurrency: int, *,
        max_new_tokens: int | None = None, apart: bool = True, sampling: Sampling = GREEDY,
    ) -> Wanted:  # fmt: skip
        settings = self.request.settings
        load = Load(
            concurrency=concurrency,
            sampling=sampling,
            max_new_tokens=max_new_tokens or self.asked.max_new_tokens,
            request_timeout_seconds=settings.generation.request_timeout_seconds,
            maximum_attempts=settings.generation.maximum_attempts,
            with_drafter=served.drafter is not None,
            apart=apart,
        )
        drafted = {"drafter": self.exported.fingerprint, "at": str(served.drafter), **served.drafting.model_dump()}
        key = fingerprint_of(
            {
                "version": BENCHMARK_VERSION,
                "load": [load.concurrency, load.max_new_tokens, load.sampling.model_dump(), load.apart],
                "serving": settings.serving.model_dump(exclude=set(NOT_MEASURED)),
                "verifier": settings.verifier.model_dump(mode="json"),
                "drafted": None if served.drafter is None else drafted,
                "prompts": {one.dataset: [[p.sample_id, list(p.prompt_ids)] for p in one.prompts] for one in held},
            }
        )
        path = self.request.files.benchmark / f"{name}.json"
        return Wanted(path=path, key=key, held=held, load=load, label=name)

    def _measure(self, served: Served, wanted: Sequence[Wanted]) -> list[Measurement]:
        def require(_url: str, facts: ServerFacts) -> None:
            require_drafter(facts, served.drafter, served.drafting)

        server = MeasuredServer(open=lambda: self._open(served), require=require, own=True)
        return measure_missing(server, wanted, self.events, force=self.request.force)

    def _open(self, served: Served) -> AbstractContextManager[str]:
        return benchmark_server(self.request, served.drafter, served.drafting, self.events)


def _sweep_name(drafting: DraftSettings) -> str:
    return f"sweep-{drafting.num_steps}-{drafting.eagle_topk}-{drafting.num_draft_tokens}"
