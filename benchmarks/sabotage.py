"""What a training set that is broken in one way comes to: which check stops it, and how it would serve.

    PYTHONPATH=include:. .aerie/envs/model/bin/python benchmarks/sabotage.py [--data .aerie/data] [--edition main]
        [--folder /tmp/sabotage] [--epochs 2] [--seeds 20] [--only "reasoning stripped"] [--markdown table.md]

Takes the validated rows of a run of the demo, and for each sabotage runs the real stages twice: with every check, to
see which one refuses, and with that check put out of action, to see the drafter that it would have cost: what its
validation promises, and what real SGLang serves it at. The states are written by transformers, the server is a CPU's.
"""

import argparse
import shutil
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
    quickly_served,
    shifted_mask,
    stripped_reasoning,
    without_parity,
)

from aerie.artefacts.corpus import read_token_counts
from aerie.artefacts.manifest import read_manifest
from aerie.corpus import stage as corpus_stage
from aerie.errors import AerieError
from aerie.serving import client
from aerie.settings.machine import PROJECT_ROOT
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
    gates: str = ""
    suspects: str = ""
    seconds: float = 0.0


class NotCaught(Exception):
    """No check refused the training: it would have begun."""


def sabotages(close_id: int) -> list[Sabotage]:
    """All of them, a healthy one first."""
    boundaries = partial(checks_off, "corpus.boundaries.require_boundaries")
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
        Sabotage("stale vocabulary", stale_vocabulary=True),
    ]


@contextmanager
def counted_of(dataset: str) -> Iterator[None]:
    """Have the vocabulary chosen from the tokens of one data set alone."""

    def read(folder: Path) -> dict[str, dict[int, int]]:
        return {dataset: read_token_counts(folder)[dataset]}

    with mock.patch.object(corpus_stage, "read_token_counts", read):
        yield


def copied(source: Path, pipeline: Pipeline) -> None:
    """Begin with the data sets of ``source``."""
    shutil.rmtree(pipeline.files.folder, ignore_errors=True)
    shutil.copytree(source / "datasets", pipeline.files.folder / "datasets")


def prepare(pipeline: Pipeline, sabotage: Sabotage) -> None:
    """Run the stages up to ``forecast`` with the sabotage in them."""
    if sabotage.rows is not None:
        pipeline.change_samples(sabotage.rows)
    if sabotage.stale_vocabulary:
        seed = pipeline.settings.seed
        pipeline.settings = pipeline.settings.model_copy(update={"seed": seed + 1})
        pipeline.merge()
        stale = pipeline.files.vocabulary.rename(pipeline.files.vocabulary.with_name("stale"))
        pipeline.settings = pipeline.settings.model_copy(update={"seed": seed})
        pipeline.merge()
        shutil.rmtree(pipeline.files.vocabulary)
        stale.rename(pipeline.files.vocabulary)
    else:
        pipeline.merge()
    pipeline.write_states(sabotage.states)


def stopped(pipeline: Pipeline) -> str:
    """The first check that refuses, with the beginning of its message."""

    def begin(*_: Any) -> None:
        raise NotCaught

    for name, run in (
        ("forecast", pipeline.forecast),
        ("capture", pipeline.capture),
        ("train", pipeline.train),
    ):
        try:
            with mock.patch.object(training, "run", begin):
                run()
        except AerieError as error:
            return f"`{name}`: {' '.join(str(error).split())}".replace(str(pipeline.folder), "")
        except NotCaught:
            break
    return "nothing"


def run(sabotage: Sabotage, arguments: argparse.Namespace, settings: PipelineSettings, seed: int) -> Outcome:
    """One sabotage with one seed."""
    began = time.monotonic()
    training_settings = settings.training.model_copy(update={"epochs": arguments.epochs, "seed": seed})
    settings = settings.model_copy(update={"training": training_settings})
    name = "".join(c if c.isalnum() else "_" for c in f"{sabotage.name}_{seed}".lower())
    pipeline = Pipeline(arguments.folder, settings, name)
    copied(arguments.data / "editions" / arguments.edition, pipeline)
    prepare(pipeline, sabotage)
    outcome = Outcome(sabotage.name, seed)
    with sabotage.meddled():
        if sabotage.name != "none":
            outcome.caught_by = stopped(pipeline)
            pipeline.settings = without_parity(settings)
        if sabotage.stale_vocabulary:
            with counted_of(OTHER_VOCABULARY):
                pipeline.run(corpus_stage.vocabulary)
        with sabotage.past():
            pipeline.forecast()
            pipeline.capture()
            trained = pipeline.train().manifest
            pipeline.export()
    if trained is not None and trained.counts["validation"]:
        outcome.promised = trained.counts["validation"]["estimated_acceptance_length"]
    results = pipeline.serve(arguments.folder / "plain")
    outcome.served = results["acceptance_length"]
    outcome.gates = ", ".join(gate["gate"] for gate in results["gates"] if gate["verdict"] == "failed")
    outcome.suspects = ", ".join(cause["cause"] for cause in results["checklist"] if cause["verdict"] == "suspect")
    outcome.seconds = time.monotonic() - began
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Outcomes as a Markdown table."""
    heading = ("sabotage", "seed", "stopped before training by", "validation promised", "served", "gates that failed",
               "what the checklist suspects")  # fmt: skip
    rows = [heading, ("---",) * len(heading), *map(cells, outcomes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(one: Outcome) -> tuple[str, ...]:
    """An outcome as cells of the table."""
    promised, served = ("-" if figure is None else f"{figure:.2f}" for figure in (one.promised, one.served))
    caught = one.caught_by if len(one.caught_by) <= MESSAGE else one.caught_by[:MESSAGE] + " ..."
    return one.name, str(one.seed), caught, promised, served, one.gates or "-", one.suspects or "-"


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
    settings = quickly_served(settings, prompts=arguments.prompts, threshold=arguments.threshold)
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
