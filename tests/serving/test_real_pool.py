"""The plan against what real SGLang reports: its KV pool on a CPU, sized from the host's memory; serve environment."""

import importlib.util
import sys
from pathlib import Path

import pytest

from aerie.serving import client
from aerie.serving.calibration import Overheads, calibrated, first_guess, predict_tokens
from aerie.serving.checkpoint_files import weights_bytes
from aerie.serving.observations import Observation, read_observations
from aerie.serving.plan import ServerPlan, checkpoint_identity
from aerie.settings.machine import PROJECT_ROOT

FRACTIONS = (0.1, 0.12, 0.15)
TOLERANCE = 0.01
VERIFIER = PROJECT_ROOT / "demo" / "tiny_verifier"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is in the serve environment"),
]


def launch(folder: Path, fraction: float) -> Observation:
    plan = ServerPlan(
        model_path=VERIFIER,
        model_identity=checkpoint_identity(VERIFIER),
        dtype="float32",
        phase="generate",
        device="cpu",
        mem_fraction_static=fraction,
        context_length=1024,
    )
    handle = client.ensure_server(
        plan, folder=folder, owner="a test", python=Path(sys.executable), start_timeout_seconds=800.0
    )
    assert handle.observation is not None
    assert handle.observation.max_total_num_tokens == handle.max_total_num_tokens
    return handle.observation


def predicted(observation: Observation, overheads: Overheads) -> int:
    """The prediction, from the memory read before the launch less what other processes took until it was sized."""
    return predict_tokens(observation.undisturbed, overheads)


def test_the_pool_is_as_planned_at_several_fractions_and_after_a_launch_the_next_is_exact(folder: Path) -> None:
    launches = [launch(folder, fraction) for fraction in FRACTIONS]
    assert list(read_observations(folder)) == launches
    guess = first_guess("cpu", weights_bytes(VERIFIER, dtype_bytes=4))
    for number, one in enumerate(launches):
        others = abs(one.taken_by_others_bytes) * one.mem_fraction_static / one.bytes_per_token
        off = abs(one.predicted_max_total_num_tokens - one.max_total_num_tokens)
        assert off <= TOLERANCE * one.max_total_num_tokens + others, f"as the keeper planned it: {one}"
        assert predicted(one, guess) == pytest.approx(one.max_total_num_tokens, rel=TOLERANCE), f"a first plan: {one}"
        for earlier in (launches[:number], launches[number + 1 :]):
            overheads = calibrated(guess, one, earlier)
            assert predicted(one, overheads) == pytest.approx(one.max_total_num_tokens, rel=TOLERANCE), (
                f"after {earlier}"
            )
    assert all(0 < one.memory_left_bytes < one.memory_before_launch_bytes for one in launches if one.memory_left_bytes)
