"""Real SGLang with the demo's verifier and a drafter of random weights: on our server, and as someone else's."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from aerie.benchmark.any_drafter import benchmark_drafter
from aerie.benchmark.server import MOST_LIKELY, benchmark_server, most_likely
from aerie.serving import client
from aerie.serving.lease import read_lease
from aerie.settings.benchmark_target import BenchmarkTarget
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.stages import Events, StageRequest

DRAFT_VOCABULARY = 512


def write_drafter(folder: Path, verifier: Path) -> Path:
    """An EAGLE-3 drafter for the verifier in SGLang's layout, with random weights."""
    config = json.loads((verifier / "config.json").read_text())
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    layer = "midlayer.self_attn"
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (DRAFT_VOCABULARY, hidden), "norm": (hidden,),
        "midlayer.hidden_norm": (hidden,), "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,), "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden), "midlayer.mlp.down_proj": (hidden, inner),
        **{f"{layer}.{name}": (hidden, 2 * hidden) for name in ("q_proj", "k_proj", "v_proj")},
        f"{layer}.o_proj": (hidden, hidden),
    }  # fmt: skip
    dice = np.random.default_rng(1)
    tensors = {f"{name}.weight": dice.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["d2t"] = np.zeros(DRAFT_VOCABULARY, np.int64)
    tensors["t2d"] = np.arange(vocabulary) < DRAFT_VOCABULARY
    header, end = {}, 0
    for name, tensor in tensors.items():
        kind = {"float32": "F32", "int64": "I64", "bool": "BOOL"}[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    folder.mkdir()
    weights = struct.pack("<Q", len(told)) + told + b"".join(tensor.tobytes() for tensor in tensors.values())
    (folder / "model.safetensors").write_bytes(weights)
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "hidden_act")  # fmt: skip
    described = {
        **{name: config[name] for name in same}, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCABULARY, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_drafter_and_any_server_are_measured_on_real_sglang(tmp_path):
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    asked = settings.benchmark.model_copy(update={"max_new_tokens": 24})
    settings = settings.model_copy(update={"benchmark": asked})
    drafter = write_drafter(tmp_path / "drafter", settings.verifier.path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [*range(40, 60 + n)]}) + "\n" for n in range(4)))

    events = Events(tmp_path / "events.jsonl")

    def requested(concurrency, **target):
        return StageRequest(
            settings=settings, data_root=tmp_path, server_folder=tmp_path / "server", edition="main", run_id="real",
            target=BenchmarkTarget(prompts_file=prompts, concurrency=concurrency, **target),
        )  # fmt: skip

    def measure(concurrency, **target):
        return benchmark_drafter(requested(concurrency, **target), events).manifest.counts["measurements"]

    try:
        with benchmark_server(requested((1,), drafter=drafter), None, asked, events) as url:  # measured next, as it is
            likely = most_likely(url, range(40, 60))
        rows = measure((1, 4), drafter=drafter)
        (as_served,) = measure((4,), server_url=read_lease(tmp_path / "server").url)
    finally:
        client.stop(tmp_path / "server")
    (first, *_) = sorted(likely, key=likely.get, reverse=True)
    own = json.loads(next(tmp_path.rglob("without-1.json")).read_text())["runs"]["prompts"]["requests"][0]
    assert len(likely) == MOST_LIKELY and max(likely.values()) < 0
    assert first == own["output_ids"][0], "the likeliest token is not the one that greedy decoding says"
    for row in rows:
        assert row["lossless"] is True, "speculation changed what the verifier says"
        assert 1 <= row["acceptance_length"] <= asked.num_steps + 1 and row["speed_up"] > 0
        assert len(row["acceptance_by_position"]) <= asked.num_steps  # random drafts are hardly ever accepted
        assert row["servers"]["trained"]["speculative_draft_model_path"] == str(drafter)
    assert as_served["lossless"] is None and as_served["tokens_per_second"] > 0
    assert as_served["settings"]["num_draft_tokens"] == asked.num_draft_tokens
    assert math.isclose(as_served["acceptance_length"], rows[1]["acceptance_length"], rel_tol=0.2)
