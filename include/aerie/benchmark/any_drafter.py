"""The stage ``benchmark_drafter``: any drafter on our server, or a server of someone else's as it is.

The pipeline's own ``benchmark`` judges the drafter that an edition exported. This one only measures: it has no gate,
and says what it did not measure.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from aerie.artefacts.files import fingerprint_of, write_json
from aerie.artefacts.manifest import InputFile, answered_by, describe_input, describe_output, write_manifest
from aerie.benchmark.measurement import MeasuredServer, Measurement, Wanted, measure_missing
from aerie.benchmark.measures import DEFINITION, summarise
from aerie.benchmark.requests import GREEDY, Held, Load, held_out_prompts, prompts_of_file
from aerie.benchmark.results import RESULTS_FILE
from aerie.benchmark.server import NOT_MEASURED, ServerFacts, benchmark_server, require_drafter
from aerie.errors import BadInput
from aerie.serving.timeline import only
from aerie.settings.benchmark_target import BenchmarkTarget
from aerie.stages import Events, StageRequest, StageResult

DRAFTER_BENCHMARK_VERSION = 2
"""Raised when the same drafter, server and prompts would be measured otherwise."""

MEASURED_BY = {"prompts_per_dataset", "max_new_tokens", "num_steps", "eagle_topk", "num_draft_tokens"}
"""Fields of ``BenchmarkSettings`` that this stage reads; the others are the pipeline's own benchmark's."""

Side = Literal["without", "with"]
NO_UNTRAINED = "only the pipeline's own benchmark has the drafter before its training"
NO_VERIFIER = "no verifier_url: there is no plain verifier to compare with"
OTHERS_SERVER = (
    "the server is someone else's: it may have served others at the same time, and have had prompts in its cache"
)


def benchmark_drafter(request: StageRequest, events: Events) -> StageResult:
    """Measure a drafter, or a server as it is, at each concurrency.

    Raises:
        BadInput: there is no such drafter, there are no prompts, or a server does not serve what it is said to.
        Failed: a request failed for good, or our server runs something else than asked for.
        Retryable: a server went away.
    """
    target = _target(request)
    held = prompts_of(request, target)
    inputs = list(_inputs(target, held))
    fingerprint = _fingerprint(request, target, inputs, held)
    folder = request.files.drafter_benchmark(fingerprint)
    manifest_path = folder / "manifest.json"
    data = {"drafter_id": target.drafter_id}
    answer = None
    if target.drafter is not None and not request.force:
        answer = answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None:
        events.progress(f"nothing to do: {folder / RESULTS_FILE} answers this drafter, these prompts and settings")
        return StageResult(stage="benchmark_drafter", reused=True, manifest=answer, data=data)
    manifest_path.unlink(missing_ok=True)
    bench = _Bench(request, target, held, folder, fingerprint, events)
    measured: dict[Side, Mapping[int, Measurement]] = {side: bench.measure(side) for side in _sides(target)}
    rows = [_row(bench, measured, concurrency) for concurrency in target.concurrency]
    write_json(folder / RESULTS_FILE, {"measurements": rows})
    for row in rows:
        _report(row, events)
    manifest = write_manifest(
        manifest_path,
        stage="benchmark_drafter",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(folder / RESULTS_FILE)],
        counts={**data, "measurements": rows},
    )
    return StageResult(stage="benchmark_drafter", reused=False, manifest=manifest, data=data)


def _target(request: StageRequest) -> BenchmarkTarget:
    if request.target is None:
        raise BadInput("this stage needs to know what it measures: the request must say so in 'target'")
    return request.target


def prompts_of(request: StageRequest, target: BenchmarkTarget) -> list[Held]:
    """The prompts to send: of the file, as many as of a data set, or the edition's held-out ones.

    Where they are of a file, the server stops where its own checkpoint says.

    Raises:
        BadInput: there is none, or one is longer than the server's context.
    """
    if target.prompts_file is None:
        return held_out_prompts(only(request.settings, request.selected), request.files)
    return [prompts_of_file(target.prompts_file, request.settings, stop_token_ids=())]


def _inputs(target: BenchmarkTarget, held: list[Held]) -> Iterator[InputFile]:
    if target.drafter is not None:
        weights = sorted(target.drafter.glob("*.safetensors"))
        if not weights or not (target.drafter / "config.json").is_file():
            raise BadInput(
                f"{target.drafter}: no drafter there; expected one in SGLang's layout: config.json and *.safetensors"
            )
        yield from map(describe_input, (target.drafter / "config.json", *weights))
    for one in held:
        yield describe_input(one.path)


def _fingerprint(request: StageRequest, target: BenchmarkTarget, inputs: list[InputFile], held: list[Held]) -> str:
    """What the figures depend on; of a server of someone else's, the run too, because nobody knows what it was."""
    settings = request.settings
    return fingerprint_of(
        {
            "version": DRAFTER_BENCHMARK_VERSION,
            "target": target.model_dump(mode="json"),
            "settings": settings.benchmark.model_dump(include=MEASURED_BY),
            "serving": settings.serving.model_dump(exclude=set(NOT_MEASURED)),
            "verifier": settings.verifier.model_dump(mode="json"),
            "inputs": [one.sha256 for one in inputs],
            "datasets": [one.dataset for one in held],
            "run": None if target.server_url is None else request.run_id,
        }
    )


def _sides(target: BenchmarkTarget) -> tuple[Side, ...]:
    return ("with",) if target.server_url is not None and target.verifier_url is None else ("without", "with")


class _Bench:
    """One benchmark: what is measured with and without the drafter is measured once, whatever is tried again."""

    def __init__(
        self,
        request: StageRequest,
        target: BenchmarkTarget,
        held: list[Held],
        folder: Path,
        key: str,
        events: Events,
    ) -> None:
        self.request, self.target, self.held = request, target, held
        self.folder, self.key, self.events = folder, key, events

    def measure(self, side: Side) -> dict[int, Measurement]:
        """Measure one side at each concurrency, or take up what an earlier try measured."""
        wanted = [
            Wanted(
                path=self.folder / f"{side}-{number}.json",
                key=self.key,
                held=self.held,
                load=self._load(side, number),
                label=f"{side}, {number} at once",
            )
            for number in self.target.concurrency
        ]
        server = MeasuredServer(
            open=lambda: self._server(side),
            require=lambda url, facts: self._require(side, url, facts),
            own=self.target.server_url is None,
        )
        measured = measure_missing(server, wanted, self.events, force=self.request.force)
        return dict(zip(self.target.concurrency, measured, strict=True))

    @contextmanager
    def _server(self, side: Side) -> Iterator[str]:
        if self.target.server_url is None:
            drafter = self.target.drafter if side == "with" else None
            with benchmark_server(self.request, drafter, self.request.settings.benchmark, self.events) as url:
                yield url
        else:
            yield self.target.server_url if side == "with" else str(self.target.verifier_url)

    def _require(self, side: Side, url: str, facts: ServerFacts) -> None:
        if self.target.server_url is None:
            require_drafter(facts, self.target.drafter if side == "with" else None, self.request.settings.benchmark)
            return
        algorithm = facts.speculative_algorithm
        self.events.progress(f"{url} serves {facts.model_path} with {algorithm or 'no drafter'}; someone else owns it")
        if side == "with" and algorithm is None:
            raise BadInput(f"{url} serves {facts.model_path} without a drafter: there is nothing to measure")
        if side == "without" and algorithm is not None:
            raise BadInput(f"{url} serves a drafter ({algorithm}): verifier_url must be the plain verifier")

    def _load(self, side: Side, concurrency: int) -> Load:
        asked, generation = self.request.settings.benchmark, self.request.settings.generation
        return Load(
            concurrency=concurrency,
            sampling=GREEDY,
            max_new_tokens=asked.max_new_tokens,
            request_timeout_seconds=generation.request_timeout_seconds,
            maximum_attempts=generation.maximum_attempts,
            with_drafter=side == "with",
            apart=True,
        )


def _row(bench: _Bench, measured: Mapping[Side, Mapping[int, Measurement]], concurrency: int) -> dict[str, Any]:
    """Figures at one concurrency, with all that they are true of."""
    target, asked = bench.target, bench.request.settings.benchmark
    served = measured["with"][concurrency]
    plain = measured["without"][concurrency] if "without" in measured else None
    facts = served.server
    not_measured = {"acceptance_length_untrained": NO_UNTRAINED}
    if plain is None:
        not_measured |= dict.fromkeys(("lossless", "tokens_per_second_without", "speed_up"), NO_VERIFIER)
    servers = {"trained": facts.model_dump()} | ({} if plain is None else {"without": plain.server.model_dump()})
    return {
        "definition": DEFINITION,
        "drafter": {
            "drafter_id": target.drafter_id,
            "folder": facts.speculative_draft_model_path if target.drafter is None else str(target.drafter),
        },
        "server_url": target.server_url,
        "not_measured": not_measured,
        "caveats": [] if target.server_url is None else [OTHERS_SERVER],
        **summarise(None if plain is None else plain.runs, None, served.runs),
        "settings": {
            "max_new_tokens": asked.max_new_tokens,
            "concurrency": concurrency,
            "num_steps": facts.speculative_num_steps,
            "eagle_topk": facts.speculative_eagle_topk,
            "num_draft_tokens": facts.speculative_num_draft_tokens,
        },
        "servers": servers,
    }


def _report(row: Mapping[str, Any], events: Events) -> None:
    """Say what was measured at one concurrency, and what was not."""
    length = row["acceptance_length"]
    parts = [
        f"at {row['settings']['concurrency']} at once: acceptance length "
        f"{'not known, every answer was one token' if length is None else f'{length:.2f}'} on {row['prompts']} prompts",
        f"{row['tokens_per_second']:.0f} tokens/s",
    ]
    if row["lossless"] is not None:
        parts.append(f"{row['tokens_per_second_without']:.0f} without, {row['speed_up']:.2f} times as fast")
        parts.append(f"greedy output {'identical' if row['lossless'] else 'NOT identical'}")
    else:
        parts.append(f"losslessness and speed-up not measured: {row['not_measured']['lossless']}")
    events.progress("; ".join(parts))
    events.metric(
        concurrency=row["settings"]["concurrency"], acceptance_length=length,
        tokens_per_second=row["tokens_per_second"], tokens_per_second_without=row["tokens_per_second_without"],
    )  # fmt: skip
    if row["lossless"] is False:
        events.alert("benchmark", f"greedy output differs for {len(row['divergences'])} of {row['prompts']} prompts")
