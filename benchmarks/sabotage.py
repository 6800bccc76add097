"""What a training set that is broken in one way comes to: which check stops it, and how it would serve.

    PYTHONPATH=include:. .aerie/envs/model/bin/python benchmarks/sabotage.py [--data .aerie/data] [--edition main]
        [--folder /tmp/sabotage] [--epochs 2] [--seeds 20] [--only "reasoning stripped"] [--markdown table.md]

Takes the validated rows of a run of the demo, and for each sabotage runs the real stages twice: with every check, to
see which one refuses, and with that check put out of action, to see the drafter that it would have cost: what its
validation promises, and what real SGLang serves it at. The states are written by transformers, the server is a CPU's.
"""

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.sabotage.pipeline import (
    Pipeline,
    RowChange,
    StateChange,
    after_the_norm,
    another_model,
    checks_off,
    exported_one_layer_later,
    healthy,
    one_layer_later,
    shifted_mask,
    stripped_reasoning,
)

from aerie.artefacts.draft_vocabulary import DraftVocabulary, read_draft_vocabulary
from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.manifest import read_manifest
from aerie.errors import AerieError
from aerie.serving import client
from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.settings.pipeline import PipelineSettings, load_settings
from aerie.training import stage as training

CLOSE = "</think>"
OTHER_VOCABULARY = "B8_sweagent"
MESSAGE = 160


@dataclass(frozen=True)
class Sabotage:
    """One way to break a training; ``meddled`` is in force throughout, ``past`` puts out of action what finds it."""

    name: str
    rows: RowChange | None = None
    states: StateChange = healthy
    stale_vocabulary: bool = False
    meddled: Callable[[], AbstractContextManager[None]] = nullcontext
    past: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class Outcome:
    """What came of it."""

    name: str
    seed: int
    caught_by: str = "nothing"
    promised: float | None = None
    served: float | None = None
    gate: str = ""
    suspects: str = ""
    seconds: float = 0.0


class NotCaught(Exception):
    """No check refused the training: it would have begun."""


def sabotages(close_id: int) -> list[Sabotage]:
    """All of them, a healthy one first."""
    boundaries = partial(checks_off, "training.evidence.require_boundaries")
    last_slot = partial(checks_off, "training.evidence.require_last_slot")
    layers = partial(checks_off, "training.stage.require_captured_layers")
    return [
        Sabotage("none"),
        Sabotage("reasoning stripped", rows=stripped_reasoning(close_id), past=boundaries),
        Sabotage("another model's states", states=another_model, past=last_slot),
        Sabotage("mask shifted by one", rows=shifted_mask, past=boundaries),
        Sabotage("layers captured at i+1 as i", states=one_layer_later),
        Sabotage("layers captured at i, exported as i+1", meddled=exported_one_layer_later, past=layers),
        Sabotage("states after the final norm", states=after_the_norm, past=last_slot),
        Sabotage("stale vocabulary", stale_vocabulary=True, past=any_vocabulary),
    ]


@contextmanager
def any_vocabulary() -> Iterator[None]:
    """Take a vocabulary for that of any corpus."""

    def read(folder: Path, **_: str) -> DraftVocabulary:
        told = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        return read_draft_vocabulary(folder, corpus_fingerprint=told["corpus_fingerprint"])

    with mock.patch.object(training, "read_draft_vocabulary", read):
        yield


def copied(source: Path, pipeline: Pipeline) -> None:
    """Begin with the data sets of ``source``."""
    shutil.rmtree(pipeline.files.folder, ignore_errors=True)
    shutil.copytree(source / "datasets", pipeline.files.folder / "datasets")


def prepare(pipeline: Pipeline, sabotage: Sabotage, stale: Path) -> None:
    """Run the stages up to ``capture`` with the sabotage in them."""
    if sabotage.rows is not None:
        pipeline.change_samples(sabotage.rows)
    pipeline.merge()
    if sabotage.stale_vocabulary:
        shutil.rmtree(pipeline.files.vocabulary)
        shutil.copytree(stale, pipeline.files.vocabulary)
    pipeline.write_states(sabotage.states)


def stopped(pipeline: Pipeline) -> str:
    """The first check that refuses, with the beginning of its message."""

    def begin(*_: Any) -> None:
        raise NotCaught

    for name, run in (("capture", pipeline.capture), ("train", pipeline.train)):
        try:
            with mock.patch.object(training, "run", begin):
                run()
        except AerieError as error:
            return f"`{name}`: {' '.join(str(error).split())}".replace(str(pipeline.folder), "")
        except NotCaught:
            break
    return "nothing"


def settings_without_parity(settings: PipelineSettings) -> PipelineSettings:
    """As they are for verifiers that transformers cannot hold on the CPU."""
    states = settings.hidden_states.model_copy(update={"parity_rows": 0})
    return settings.model_copy(update={"hidden_states": states})


def serve(pipeline: Pipeline, without: Path) -> tuple[float, str, list[str]]:
    """Benchmark the exported drafter: acceptance length, what the gates said, and the causes that are suspected."""
    benchmark = pipeline.files.benchmark
    benchmark.mkdir(parents=True, exist_ok=True)
    if without.is_file():
        shutil.copy(without, benchmark / without.name)
    request, events = pipeline.folder / "request.json", pipeline.folder / "benchmark.jsonl"
    request.write_text(pipeline.request().model_dump_json(), encoding="utf-8")
    events.unlink(missing_ok=True)
    arguments = ("--request", request, "--result", pipeline.folder / "result.json", "--events", events)
    ended = subprocess.run(
        [python_of("airflow"), "-m", "aerie", "stage", "benchmark", *arguments],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not without.is_file():
        shutil.copy(benchmark / without.name, without)
    results = benchmark / "results.json"
    if not results.is_file():
        raise SystemExit(f"the benchmark of {pipeline.edition} wrote no results:\n{ended.stderr[-3000:]}")
    errors = [told["message"] for told in map(json.loads, events.read_text().splitlines()) if told["type"] == "error"]
    said = errors[-1] if errors else "passed"
    suspects = [line.removeprefix("- suspect: ") for line in said.splitlines() if line.startswith("- suspect: ")]
    return json.loads(results.read_text())["acceptance_length"], said.splitlines()[0], suspects


def run(sabotage: Sabotage, arguments: argparse.Namespace, settings: PipelineSettings, seed: int) -> Outcome:
    """One sabotage with one seed."""
    began = time.monotonic()
    training_settings = settings.training.model_copy(update={"epochs": arguments.epochs, "seed": seed})
    settings = settings.model_copy(update={"training": training_settings})
    name = "".join(c if c.isalnum() else "_" for c in f"{sabotage.name}_{seed}".lower())
    pipeline = Pipeline(arguments.folder, settings, name)
    source, stale = arguments.data / "editions" / arguments.edition, arguments.folder / "stale_vocabulary"
    copied(source, pipeline)
    prepare(pipeline, sabotage, stale)
    outcome = Outcome(sabotage.name, seed)
    with sabotage.meddled():
        if sabotage.name != "none":
            outcome.caught_by = stopped(pipeline)
            pipeline.settings = settings_without_parity(settings)
        with sabotage.past():
            pipeline.capture()
            trained = pipeline.train().manifest
            pipeline.export()
    if trained is not None and trained.counts["validation"]:
        outcome.promised = trained.counts["validation"]["estimated_acceptance_length"]
    key = fingerprint_of([settings.benchmark.model_dump(mode="json")])[:12]
    outcome.served, outcome.gate, suspects = serve(pipeline, arguments.folder / f"without-{key}" / "without.json")
    outcome.suspects = "; ".join(suspects)
    outcome.seconds = time.monotonic() - began
    return outcome


def write_stale_vocabulary(arguments: argparse.Namespace, settings: PipelineSettings) -> None:
    """The draft vocabulary of an earlier corpus: one data set only."""
    smaller = settings.model_copy(
        update={
            "datasets": {OTHER_VOCABULARY: settings.dataset(OTHER_VOCABULARY)},
            "vocabulary": settings.vocabulary.model_copy(update={"minimum_coverage": 0.0}),
        }
    )
    pipeline = Pipeline(arguments.folder, smaller, "earlier")
    copied(arguments.data / "editions" / arguments.edition, pipeline)
    pipeline.merge()
    shutil.copytree(pipeline.files.vocabulary, arguments.folder / "stale_vocabulary", dirs_exist_ok=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """Outcomes as a Markdown table."""
    lines = [
        "| sabotage | seed | caught before training by | validation promised | served | the benchmark suspects |",
        "|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        promised = "-" if one.promised is None else f"{one.promised:.2f}"
        served = "-" if one.served is None else f"{one.served:.2f}"
        caught = one.caught_by if len(one.caught_by) <= MESSAGE else one.caught_by[:MESSAGE] + " ..."
        lines.append(f"| {one.name} | {one.seed} | {caught} | {promised} | {served} | {one.suspects or '-'} |")
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=PROJECT_ROOT / ".aerie" / "data")
    parser.add_argument("--edition", default="main")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/sabotage"))  # noqa: S108 - made by who runs it
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help="of each data set, held out")
    parser.add_argument("--threshold", type=float, default=1.6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[20])
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run them all and print the table."""
    arguments = parsed()
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    asked = {
        "compare_untrained": False,
        "minimum_acceptance_length": arguments.threshold,
        "prompts_per_dataset": arguments.prompts,
    }
    states = settings.hidden_states.model_copy(update={"backend": "transformers"})
    settings = settings.model_copy(
        update={"benchmark": settings.benchmark.model_copy(update=asked), "hidden_states": states}
    )
    write_stale_vocabulary(arguments, settings)
    source = arguments.data / "editions" / arguments.edition / "vocabulary.manifest.json"
    close_id = read_manifest(source).counts["forced"][CLOSE]
    outcomes = []
    try:
        for seed in arguments.seeds:
            for sabotage in sabotages(close_id):
                if not arguments.only or sabotage.name in arguments.only:
                    outcomes.append(run(sabotage, arguments, settings, seed))
                    print(outcomes[-1], flush=True)
                    if arguments.markdown:
                        arguments.markdown.write_text(table(outcomes) + "\n", encoding="utf-8")
    finally:
        client.stop(arguments.folder / "server")
    print(table(outcomes))


if __name__ == "__main__":
    main()
