"""What the checks before training stop, let through, trained and served: the benchmark stops it too, and says why."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from aerie.artefacts.manifest import read_manifest
from aerie.serving import client

from .pipeline import (
    THRESHOLD,
    Pipeline,
    RowChange,
    StateChange,
    another_model,
    checks_off,
    healthy,
    small_settings,
    stripped_reasoning,
    without_parity,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EPOCHS = 5


class Bench:
    """Trains and serves drafters of one edition; the verifier alone is measured once."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = Pipeline(folder, small_settings(epochs=EPOCHS))
        self.pipeline.take_in()
        shutil.copytree(self.pipeline.files.folder, folder / "taken_in")

    def serve(
        self, rows: RowChange | None, states: StateChange, past: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, Any]:
        """Results of the benchmark of a drafter made so."""
        pipeline = self.pipeline
        shutil.rmtree(pipeline.files.folder)
        shutil.copytree(pipeline.folder / "taken_in", pipeline.files.folder)
        pipeline.settings = without_parity(pipeline.settings)
        if rows is not None:
            pipeline.change_samples(rows)
        pipeline.merge()
        pipeline.write_states(states)
        with past():
            pipeline.capture()
            pipeline.train()
        pipeline.export()
        return pipeline.serve(pipeline.folder / "plain")

    def close_id(self) -> int:
        """Id of the token that ends reasoning."""
        self.pipeline.merge()
        return int(read_manifest(self.pipeline.files.manifest("vocabulary")).counts["forced"]["</think>"])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("served")
    try:
        yield Bench(folder)
    finally:
        client.stop(folder / "server")


@pytest.fixture(scope="module")
def healthy_length(bench: Bench) -> float:
    results = bench.serve(None, healthy, nullcontext)
    assert results["exit_code"] == 0, results["said"][-2000:]
    return float(results["acceptance_length"])


def failed(results: dict[str, Any]) -> list[str]:
    return [gate["gate"] for gate in results["gates"] if gate["verdict"] == "failed"]


def suspects(results: dict[str, Any]) -> dict[str, str]:
    return {one["cause"]: one["evidence"] for one in results["checklist"] if one["verdict"] == "suspect"}


def test_stripped_reasoning_fails_the_benchmark_though_its_own_validation_is_good(
    bench: Bench, healthy_length: float
) -> None:
    rows = stripped_reasoning(bench.close_id())
    results = bench.serve(rows, healthy, lambda: checks_off("training.evidence.require_boundaries"))
    assert results["exit_code"] == 1 and "threshold" in failed(results)
    assert results["acceptance_length"] < THRESHOLD < healthy_length
    assert results["acceptance_length"] < results["estimate"]["acceptance_length"]
    assert "no_close" in suspects(results)["boundary broken in the data"]


def test_states_of_another_model_fail_the_benchmark(bench: Bench, healthy_length: float) -> None:
    results = bench.serve(None, another_model, lambda: checks_off("training.evidence.require_last_slot"))
    assert results["exit_code"] == 1 and "threshold" in failed(results)
    assert results["acceptance_length"] < THRESHOLD < healthy_length
    assert "another model's states" in suspects(results)["norm position"]
