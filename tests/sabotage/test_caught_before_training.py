"""Each way to break a training set is put into a tiny real pipeline, and stopped before a step is paid for."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aerie.artefacts.manifest import read_manifest
from aerie.boundary.stage import validate
from aerie.errors import AerieError, Failed
from aerie.hidden_states.stage import capture
from aerie.prompts.stage import import_tokenised
from aerie.stages import STAGES

from .pipeline import (
    TOKENISED,
    Pipeline,
    RowChange,
    after_the_norm,
    another_model,
    checks_off,
    exported_one_layer_later,
    healthy,
    one_layer_later,
    shifted_mask,
    small_settings,
    stripped_reasoning,
    without_parity,
)


class WouldTrain(Exception):
    """The trainer would have been started."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A healthy edition, up to ``capture``."""
    pipeline = Pipeline(tmp_path_factory.mktemp("sabotage"), small_settings(epochs=1))
    pipeline.take_in()
    pipeline.merge()
    pipeline.forecast()
    pipeline.write_states(healthy)
    pipeline.capture()
    shutil.copytree(pipeline.files.folder, pipeline.folder / "healthy", symlinks=True)
    return pipeline


@pytest.fixture
def pipeline(built: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """The healthy edition, in which the trainer only says that it would have been started."""

    def begin(*_: Any) -> None:
        raise WouldTrain

    monkeypatch.setattr("aerie.training.stage.run", begin)
    settings = built.settings
    yield built
    built.settings = settings
    shutil.rmtree(built.files.folder)
    shutil.copytree(built.folder / "healthy", built.files.folder, symlinks=True)


def close_id(pipeline: Pipeline) -> int:
    return int(read_manifest(pipeline.files.manifest("vocabulary")).counts["forced"]["</think>"])


def require_found(pipeline: Pipeline, problem: str) -> None:
    """Require that rows are refused by ``forecast``, and by ``train`` where they were captured all the same."""
    with pytest.raises(Failed, match=problem):
        pipeline.forecast()
    with checks_off("corpus.boundaries.require_boundaries"):
        pipeline.forecast()
        pipeline.write_states(healthy)
        pipeline.capture()
    with pytest.raises(Failed, match=problem):
        pipeline.train()


def test_a_healthy_pipeline_is_stopped_by_none_of_the_checks(pipeline: Pipeline) -> None:
    with pytest.raises(WouldTrain):
        pipeline.train()


def test_layers_captured_one_later_than_they_are_called_are_found_by_capture(pipeline: Pipeline) -> None:
    pipeline.write_states(one_layer_later)
    with pytest.raises(Failed, match=r"captured states are those entering layer 3 .* not layer 2"):
        pipeline.capture()


def test_layers_exported_one_later_than_they_were_captured_are_found_before_a_step(pipeline: Pipeline) -> None:
    with (
        exported_one_layer_later(),
        pytest.raises(Failed, match=r"entering layers \[3, 5, 6\], but those of \[2, 4, 5"),
    ):
        pipeline.train()


def test_states_after_the_norm_are_found_by_capture_and_without_its_reference_model_too(pipeline: Pipeline) -> None:
    pipeline.write_states(after_the_norm)
    with pytest.raises(Failed, match="those after the final norm"):
        pipeline.capture()
    pipeline.settings = without_parity(pipeline.settings)
    with pytest.raises(Failed, match="captured after the final norm"):
        pipeline.capture()
        pipeline.train()


def test_states_of_another_model_are_found_by_capture_and_without_its_reference_model_too(pipeline: Pipeline) -> None:
    pipeline.write_states(another_model)
    with pytest.raises(Failed, match=r"slot 0 .*another model"):
        pipeline.capture()
    pipeline.settings = without_parity(pipeline.settings)
    pipeline.capture()
    assert "training will refuse them" in (pipeline.folder / "events.jsonl").read_text()
    with pytest.raises(Failed, match="another model's states"):
        pipeline.train()


def test_states_that_say_they_are_another_models_are_not_captured_over(pipeline: Pipeline) -> None:
    path = pipeline.files.hidden_states / "capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"verifier": "another"}))
    pipeline.files.manifest("capture").unlink()
    with pytest.raises(Failed, match=r"captured under other conditions .*verifier another"):
        pipeline.run(capture)


@pytest.mark.parametrize("stage", ["merge", "vocabulary", "forecast", "capture", "train"])
def test_a_corpus_whose_masks_are_shifted_behind_merge_is_refused_by_every_stage(
    pipeline: Pipeline, stage: str
) -> None:
    (shard, *_) = sorted((pipeline.files.corpus / "dataset").glob("*.arrow"))
    if stage == "merge":
        shard = pipeline.files.dataset("A1").samples
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Failed, match=r"changed after it was (merged|validated)"):
        pipeline.run(STAGES[stage].load())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (shifted_mask, "prompt_not_open: .*the loss mask is off by one"),
        (stripped_reasoning, "no_close: .*the boundary token was stripped"),
    ],
)
def test_rows_broken_by_whatever_writes_them_are_found_before_capture_and_training_though_every_hash_fits(
    pipeline: Pipeline, change: Any, problem: str
) -> None:
    rows: RowChange = stripped_reasoning(close_id(pipeline)) if change is stripped_reasoning else change
    pipeline.change_samples(rows)
    pipeline.merge()
    require_found(pipeline, problem)


def test_reasoning_stripped_together_with_its_boundary_is_found(pipeline: Pipeline) -> None:
    close = close_id(pipeline)
    strip = stripped_reasoning(close)

    def closed(ids: Any, mask: Any) -> Any:
        row = strip(ids, mask)
        if row is None:
            return None
        at = int(np.flatnonzero(row[1])[0])
        return np.insert(row[0], at, close), np.insert(row[1], at, 0)

    pipeline.change_samples(closed)
    pipeline.merge()
    require_found(pipeline, "reasoning_closed: .*stripped together with its boundary")


@pytest.mark.parametrize("change", ["shifted", "stripped"])
def test_broken_rows_of_an_a_series_file_never_reach_the_corpus(
    pipeline: Pipeline, tmp_path: Path, change: str
) -> None:
    dataset = pipeline.settings.dataset("A1")
    strip = stripped_reasoning(close_id(pipeline))
    source = tmp_path / "rows.jsonl"
    with source.open("w") as file:
        for line in Path(str(dataset.source.path)).read_text().splitlines():
            row = json.loads(line)
            ids, mask = np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], np.int8)
            changed = shifted_mask(ids, mask) if change == "shifted" else strip(ids, mask)
            if changed is not None:
                file.write(
                    json.dumps(row | {"input_ids": changed[0].tolist(), "loss_mask": changed[1].tolist()}) + "\n"
                )
    settings = dataset.model_copy(update={"source": dataset.source.model_copy(update={"path": source})})
    pipeline.settings = pipeline.settings.model_copy(
        update={"datasets": {**pipeline.settings.datasets, TOKENISED[0]: settings}}
    )
    pipeline.files.dataset("A1").manifest("import").unlink()
    pipeline.run(import_tokenised, "A1")
    with pytest.raises(Failed, match=r"quarantined.*(prompt_not_open|no_close)"):
        pipeline.run(validate, "A1")


def test_a_stale_vocabulary_is_refused(pipeline: Pipeline) -> None:
    settings = pipeline.settings
    shutil.copytree(pipeline.files.vocabulary, pipeline.folder / "stale", dirs_exist_ok=True)
    pipeline.settings = settings.model_copy(update={"seed": settings.seed + 1})
    pipeline.merge()
    pipeline.forecast()
    pipeline.write_states(healthy)
    pipeline.capture()
    shutil.rmtree(pipeline.files.vocabulary)
    shutil.copytree(pipeline.folder / "stale", pipeline.files.vocabulary)
    with pytest.raises(AerieError, match="vocabulary"):
        pipeline.train()
