"""A tiny pipeline that can be sabotaged anywhere: the real stages on the demo's verifier, without a server.

State files are written by transformers before the stage ``capture`` runs: it finds all of them there, checks them and
links them, so that no request is sent.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from speculators.train.config import TrainConfig

from aerie.artefacts.corpus import DATASET_FOLDER, iterate_rows
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.manifest import describe_output, read_manifest, write_manifest
from aerie.artefacts.samples import iterate_samples, write_samples
from aerie.artefacts.state_files import state_name, state_path, write_states
from aerie.boundary.segments import trained_segments
from aerie.boundary.stage import validate
from aerie.corpus.stage import merge, vocabulary
from aerie.hidden_states.identity import bind_states, capture_identity
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.parity import Reference
from aerie.hidden_states.stage import capture, forecast
from aerie.prompts.stage import import_tokenised, prepare
from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.settings.pipeline import PipelineSettings, TrainingSettings, load_settings
from aerie.stages import Events, StageRequest, StageResult
from aerie.training.configuration import TrainerInputs, write_configuration
from aerie.training.stage import export, train

EDITION = "sabotage"
PROMPTS_OF = "B3_magicoder"
TOKENISED = ("A1", "A2")
PROMPTS = 16
THRESHOLD = 1.8

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.int8]
RowChange = Callable[[Ids, Mask], tuple[Ids, Mask] | None]
StateChange = Callable[[torch.Tensor, Reference], torch.Tensor]
"""From the states entering each layer, then the last layer's output [layers + 1, S, H], to the slots [S, L, H]."""


def small_settings(**training: Any) -> PipelineSettings:
    """The demo, with the rows of its A-series, and the prompts of one data set to benchmark on."""
    demo = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    return quickly_served(demo, prompts=PROMPTS, threshold=THRESHOLD).model_copy(
        update={
            "datasets": {key: demo.dataset(key) for key in (PROMPTS_OF, *TOKENISED)},
            "corpus": demo.corpus.model_copy(update={"require": "some"}),
            "vocabulary": demo.vocabulary.model_copy(update={"size": 448, "minimum_coverage": 0.9}),
            "training": demo.training.model_copy(update=training),
        }
    )


def without_parity(settings: PipelineSettings) -> PipelineSettings:
    """As they are for verifiers that nobody can load beside the server."""
    return settings.model_copy(update={"hidden_states": settings.hidden_states.model_copy(update={"parity_rows": 0})})


def quickly_served(settings: PipelineSettings, *, prompts: int, threshold: float) -> PipelineSettings:
    """States from transformers, and a benchmark of a few prompts of each data set, with nothing beside it."""
    benchmark = {
        "compare_untrained": False,
        "minimum_acceptance_length": threshold,
        "minimum_share_of_production": 0,
        "prompts_per_dataset": prompts,
        "max_new_tokens": 120,
        "concurrency": (8,),
        "sweep": (),
    }
    return settings.model_copy(
        update={
            "benchmark": settings.benchmark.model_copy(update=benchmark),
            "hidden_states": settings.hidden_states.model_copy(update={"backend": "transformers"}),
        }
    )


class Pipeline:
    """One edition below ``folder``; each method runs one stage, or puts something in its way."""

    def __init__(self, folder: Path, settings: PipelineSettings, edition: str = EDITION) -> None:
        self.folder = folder
        self.settings = settings
        self.edition = edition
        self.events = Events(folder / "events.jsonl")
        self._known_streams: dict[bytes, torch.Tensor] = {}

    @cached_property
    def reference(self) -> Reference:
        """The verifier."""
        return Reference(self.settings)

    def _streams(self, ids: torch.Tensor) -> torch.Tensor:
        """States entering each layer, then the last layer's output, computed once for the same ids."""
        key = ids.numpy().tobytes()
        if key not in self._known_streams:
            self._known_streams[key] = self.reference.residual_streams(ids)
        return self._known_streams[key]

    def request(self, dataset: str | None = None) -> StageRequest:
        """Request for a stage."""
        return StageRequest(
            settings=self.settings,
            data_root=self.folder / "data",
            server_folder=self.folder / "server",
            edition=self.edition,
            dataset=dataset,
            run_id=EDITION,
        )

    @property
    def files(self) -> EditionFiles:
        """Files of the edition."""
        return self.request().files

    def run(self, stage: Callable[[StageRequest, Events], StageResult], dataset: str | None = None) -> StageResult:
        """Run one stage."""
        return stage(self.request(dataset), self.events)

    def take_in(self) -> None:
        """Prepare the prompts, and import and validate the rows that come tokenised."""
        self.run(prepare, PROMPTS_OF)
        for dataset in TOKENISED:
            self.run(import_tokenised, dataset)
            self.run(validate, dataset)

    def merge(self) -> None:
        """Merge and choose the vocabulary."""
        for stage in (merge, vocabulary):
            self.run(stage)

    def write_states(self, change: StateChange) -> None:
        """Write every row's state file, as ``change`` makes it, for the next capture to find."""
        self.files.manifest("capture").unlink(missing_ok=True)
        bind_states(self.files, capture_identity(self.request(), resolve_layers(self.settings)), discard=True)
        for row in iterate_rows(self.files.corpus / DATASET_FOLDER):
            ids = torch.from_numpy(row.input_ids.astype(np.int64))
            states = change(self._streams(ids), self.reference).to(torch.bfloat16)
            path = state_path(self.files.states, state_name(row.sample_id))
            write_states(path, token_ids=ids, hidden_states=states)

    def forecast(self) -> None:
        """Judge some rows once more, and forecast."""
        self.run(forecast)

    def capture(self) -> None:
        """Check and link the state files."""
        self.run(capture)

    def train(self) -> StageResult:
        """Train."""
        return self.run(train)

    def export(self) -> StageResult:
        """Export."""
        return self.run(export)

    def serve(self, plain: Path) -> dict[str, Any]:
        """Benchmark the exported drafter on real SGLang; measurements of the verifier alone are kept in ``plain``.

        Returns:
            ``results.json``, which a drafter that fails has as well.
        """
        benchmark = self.files.benchmark
        benchmark.mkdir(parents=True, exist_ok=True)
        plain.mkdir(parents=True, exist_ok=True)
        for path in plain.iterdir():
            shutil.copy(path, benchmark)
        request = self.folder / "request.json"
        request.write_text(self.request().model_dump_json(), encoding="utf-8")
        arguments = (
            "--request", request, "--result", self.folder / "result.json", "--events", self.folder / "benchmark.jsonl",
        )  # fmt: skip
        ended = subprocess.run(
            [python_of("airflow"), "-m", "aerie", "stage", "benchmark", *arguments],
            env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        results = benchmark / "results.json"
        if not results.is_file():
            raise RuntimeError(f"the benchmark of {self.edition} wrote no results:\n{ended.stderr[-3000:]}")
        for path in benchmark.glob("without*"):
            shutil.copy(path, plain)
        answer: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
        return {**answer, "exit_code": ended.returncode, "said": ended.stderr}

    def change_samples(self, change: RowChange) -> None:
        """Change the validated rows, as a fault of whatever writes them would: the manifests know nothing of it."""
        for dataset in self.settings.datasets:
            files = self.files.dataset(dataset)
            if not files.samples.is_file():
                continue
            changed = []
            for sample in iterate_samples(files.samples):
                row = change(np.array(sample.input_ids, np.int32), np.array(sample.loss_mask, np.int8))
                if row is not None:
                    ids, mask = row
                    counts = {"prompt_tokens": int((mask == 0).sum()), "response_tokens": int(mask.sum())}
                    changed.append(replace(sample, input_ids=ids, loss_mask=mask, **counts))
            rows = write_samples(files.samples, changed)
            told = read_manifest(files.manifest("validate"))
            write_manifest(
                files.manifest("validate"),
                stage=told.stage,
                edition=told.edition,
                dataset=told.dataset,
                fingerprint=told.fingerprint,
                inputs=told.inputs,
                outputs=[describe_output(files.samples, rows), *told.outputs[1:]],
                counts=told.counts,
            )


def healthy(streams: torch.Tensor, reference: Reference, layers: Sequence[int] = (2, 4, 5)) -> torch.Tensor:
    """What the hooks capture: the streams entering ``layers``, and the last layer's output."""
    return torch.stack([streams[layer] for layer in (*layers, len(streams) - 1)], dim=1)


def one_layer_later(streams: torch.Tensor, reference: Reference) -> torch.Tensor:
    """Captured one layer behind the one that it is called after."""
    return healthy(streams, reference, (3, 5, 6))


def after_the_norm(streams: torch.Tensor, reference: Reference) -> torch.Tensor:
    """The last slot behind the final norm."""
    slots = healthy(streams, reference)
    slots[:, -1] = reference.after_norm(slots[:, -1])
    return slots


def another_model(streams: torch.Tensor, reference: Reference) -> torch.Tensor:
    """States of a model that says the same by other states: the verifier, its hidden dimensions in another order."""
    slots = healthy(streams, reference)
    order = torch.randperm(slots.shape[2], generator=torch.Generator().manual_seed(0))
    return slots[:, :, order]


def shifted_mask(ids: Ids, mask: Mask) -> tuple[Ids, Mask]:
    """The mask one token late."""
    return ids, np.concatenate([mask[:1], mask[:-1]])


def stripped_reasoning(close: int) -> RowChange:
    """Each response without its reasoning and the token ``close`` that ends it; rows without one are left out."""

    def strip(ids: Ids, mask: Mask) -> tuple[Ids, Mask] | None:
        keep = np.ones(len(ids), bool)
        for start, stop in trained_segments(mask):
            closes = np.flatnonzero(ids[start:stop] == close)
            if not len(closes):
                return None
            keep[start : start + closes[0] + 1] = False
        return ids[keep], mask[keep]

    return strip


@contextmanager
def checks_off(*names: str) -> Iterator[None]:
    """Let through what these functions of the pipeline, ``module.function``, would refuse."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(f"aerie.{name}", lambda *_: None))
        yield


@contextmanager
def exported_one_layer_later() -> Iterator[None]:
    """Tell the trainer, and so the export, of the layers behind those that were captured."""

    def later(settings: TrainingSettings, inputs: TrainerInputs, *, accelerated: bool) -> TrainConfig:
        return write_configuration(
            settings, replace(inputs, layers=tuple(layer + 1 for layer in inputs.layers)), accelerated=accelerated
        )

    with mock.patch("aerie.training.stage.write_configuration", later):
        yield
