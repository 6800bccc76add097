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

EPOCHS = 3


class Bench:
    """Trains and serves drafters of one edition; the verifier alone is measured once."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = Pipeline(folder, without_parity(small_settings(epochs=EPOCHS)))
        self.pipeline.take_in()
        shutil.copytree(self.pipeline.files.folder, folder / "taken_in")
        self.pipeline.merge()
        forced = read_manifest(self.pipeline.files.manifest("vocabulary")).counts["forced"]
        self.close_id = int(forced["</think>"])

    def serve(
        self,
        *,
        rows: RowChange | None = None,
        states: StateChange = healthy,
        past: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[str, Any]:
        """Results of the benchmark of a drafter made so; ``past`` puts out of action what would have refused it."""
        pipeline = self.pipeline
        shutil.rmtree(pipeline.files.folder)
        shutil.copytree(pipeline.folder / "taken_in", pipeline.files.folder)
        if rows is not None:
            pipeline.change_samples(rows)
        pipeline.merge()
        pipeline.write_states(states)
        with past():
            pipeline.forecast()
            pipeline.capture()
            pipeline.train()
        pipeline.export()
        return pipeline.serve(pipeline.folder / "plain")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("served")
    try:
        yield Bench(folder)
    finally:
        client.stop(folder / "server")


def require_failed(results: dict[str, Any]) -> None:
    assert results["exit_code"] == 1, results["said"][-2000:]
    assert "threshold" in [gate["gate"] for gate in results["gates"] if gate["verdict"] == "failed"]
    assert results["acceptance_length"] < THRESHOLD


def suspects(results: dict[str, Any]) -> dict[str, str]:
    return {one["cause"]: one["evidence"] for one in results["checklist"] if one["verdict"] == "suspect"}


def test_a_healthy_drafter_passes_the_benchmark_that_the_sabotaged_ones_fail(bench: Bench) -> None:
    results = bench.serve()
    assert results["exit_code"] == 0, results["said"][-2000:]
    assert results["acceptance_length"] > THRESHOLD


def test_stripped_reasoning_fails_the_benchmark_though_its_own_validation_is_good(bench: Bench) -> None:
    rows = stripped_reasoning(bench.close_id)
    results = bench.serve(rows=rows, past=lambda: checks_off("corpus.boundaries.require_boundaries"))
    require_failed(results)
    assert results["estimate"]["acceptance_length"] > THRESHOLD
    assert "no_close" in suspects(results)["boundary broken in the data"]


def test_states_of_another_model_fail_the_benchmark(bench: Bench) -> None:
    results = bench.serve(states=another_model, past=lambda: checks_off("training.evidence.require_last_slot"))
    require_failed(results)
    assert "another model's states" in suspects(results)["norm position"]
