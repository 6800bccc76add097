"""The plan against what real SGLang reports: its KV pool on a CPU, sized from the host's memory; serve environment."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from aerie.artefacts.observations import Observation, read_observations
from aerie.serving import client
from aerie.serving.calibration import Overheads, calibrated, first_guess, predict_tokens
from aerie.serving.checkpoint_files import weights_bytes
from aerie.serving.plan import ServerPlan, checkpoint_identity
from aerie.settings.machine import PROJECT_ROOT

TOLERANCE = 0.01
OTHERS_TOLERANCE = 0.05
"""What others' taking or giving back of memory may change of a pool, as a share of it. It is counted once, and as much
again may move until SGLang measures: each prediction may be off by so much more."""
QUIET_TRIES = 8
VERIFIER = PROJECT_ROOT / "demo" / "tiny_verifier"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is in the serve environment"),
]


@pytest.fixture
def heavy_verifier(tmp_path: Path) -> Path:
    """The demo's verifier made wide, with random weights: 270 MB stored, 540 MB as served here, a fifth of the pool."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "heavy"
    shutil.copytree(VERIFIER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((VERIFIER / "config.json").read_text())
    width, inner, layers, vocabulary = 1024, 4096, config["num_hidden_layers"], config["vocab_size"]
    wide = {"hidden_size": width, "intermediate_size": inner, "head_dim": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    (folder / "config.json").write_text(json.dumps(config | wide | heads))
    shapes = {"model.embed_tokens": (vocabulary, width), "lm_head": (vocabulary, width), "model.norm": (width,)}
    for layer in range(layers):
        parts = {f"self_attn.{part}_proj": (width, width) for part in "qkvo"}
        parts |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
        parts |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    torch.manual_seed(0)
    weights = {
        f"{name}.weight": (0.02 * torch.randn(shape) if len(shape) == 2 else torch.ones(shape)).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def launch(folder: Path, verifier: Path, fraction: float) -> Observation:
    """A launch during which nobody else took or gave back memory worth a difference: it is repeated until it is one."""
    for _ in range(QUIET_TRIES):
        observation = _launch(folder, verifier, fraction)
        if others_share(observation) <= OTHERS_TOLERANCE:
            return observation
        client.stop(folder)
    raise AssertionError(f"{QUIET_TRIES} launches, and others took or gave back memory during each: {observation}")


def _launch(folder: Path, verifier: Path, fraction: float) -> Observation:
    plan = ServerPlan(
        model_path=verifier,
        model_identity=checkpoint_identity(verifier),
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


def others_share(observation: Observation) -> float:
    """Share of the pool that others took, or gave back, while the server started."""
    moved_bytes = abs(observation.taken_by_others_bytes) * observation.mem_fraction_static
    return moved_bytes / observation.bytes_per_token / observation.max_total_num_tokens


def predicted(observation: Observation, overheads: Overheads) -> int:
    """The prediction, from the memory read before the launch less what others took until the pool was sized."""
    return predict_tokens(observation.undisturbed, overheads)


def test_the_pool_is_as_planned_at_several_fractions_and_one_launch_plans_the_next(
    folder: Path, heavy_verifier: Path
) -> None:
    launches = [launch(folder, VERIFIER, 0.1), launch(folder, heavy_verifier, 0.12), launch(folder, VERIFIER, 0.15)]
    assert [one for one in read_observations(folder) if one in launches] == launches
    first, heavy, last = launches
    for one, verifier in ((first, VERIFIER), (heavy, heavy_verifier), (last, VERIFIER)):
        reported, others = one.max_total_num_tokens, others_share(one)
        planned = pytest.approx(reported, rel=TOLERANCE + 2 * others)
        assert one.predicted_max_total_num_tokens == planned, f"as the keeper planned it: {one}"
        guess = first_guess("cpu", weights_bytes(verifier, dtype_bytes=4))
        counted = pytest.approx(reported, rel=TOLERANCE + others)
        assert predicted(one, guess) == counted, f"of a model never launched: {one}"
        assert one.memory_left_bytes is not None
        assert 0 < one.memory_left_bytes < one.memory_before_launch_bytes + abs(one.taken_by_others_bytes)
    for one, other in ((first, last), (last, first)):
        overheads = calibrated(first_guess("cpu", 0), one, [other])  # the launch tells of the weights
        counted = pytest.approx(one.max_total_num_tokens, rel=TOLERANCE + others_share(one) + others_share(other))
        assert predicted(one, overheads) == counted, f"after {other}"
