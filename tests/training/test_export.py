import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.errors import Failed
from aerie.training.export import compare, export_drafter, serving_layer_ids
from aerie.training.export_vllm import export_for_vllm, with_verifier

HIDDEN, INNER, HEADS, KEYS, HEAD_DIM, DRAFTED, VOCABULARY = 8, 12, 2, 1, 4, 6, 10


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    query, keys = HEADS * HEAD_DIM, KEYS * HEAD_DIM
    shapes = {
        "embed_tokens": (VOCABULARY, HIDDEN),
        "fc": (HIDDEN, 3 * HIDDEN),
        "input_norm": (3 * HIDDEN,),
        "norm": (HIDDEN,),
        "lm_head": (DRAFTED, HIDDEN),
        "layers.0.hidden_norm": (HIDDEN,),
        "layers.0.input_layernorm": (HIDDEN,),
        "layers.0.post_attention_layernorm": (HIDDEN,),
        "layers.0.self_attn.q_proj": (query, 2 * HIDDEN),
        "layers.0.self_attn.k_proj": (keys, 2 * HIDDEN),
        "layers.0.self_attn.v_proj": (keys, 2 * HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, query),
        "layers.0.mlp.gate_proj": (INNER, HIDDEN),
        "layers.0.mlp.up_proj": (INNER, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"{name}.weight": torch.rand(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    tensors |= {"d2t": torch.arange(DRAFTED), "t2d": torch.rand(VOCABULARY) > 0.5}
    save_file(tensors, folder / "model.safetensors")
    write_configuration(folder)
    return folder


def write_configuration(folder, decoder=None, **changed):
    configuration = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFTED,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": False,
        "norm_before_fc": True,
        "norm_output": True,
        "fc_norm": False,
        "embed_requires_grad": False,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEYS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": 1,
            "vocab_size": VOCABULARY,
            "layer_types": ["full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            **(decoder or {}),
        },
        **changed,
    }
    (folder / "config.json").write_text(json.dumps(configuration))


def rewrite(folder, **changed):
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors")


def export(checkpoint, folder, model_type="llama"):
    return export_drafter(checkpoint, folder, verifier_model_type=model_type)


def test_every_tensor_arrives_under_sglangs_name_and_the_embedding_stays_the_verifiers(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "drafter")
    trained, served = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "drafter/model.safetensors")
    assert served.keys() == {name.replace("layers.0", "midlayer") for name in trained} - {"embed_tokens.weight"}
    assert all(
        torch.equal(served[name.replace("layers.0", "midlayer")], trained[name])
        for name in trained.keys() - {"embed_tokens.weight"}
    )
    configuration = json.loads((tmp_path / "drafter/config.json").read_text())
    assert configuration["architectures"] == ["LlamaForCausalLMEagle3"]
    assert configuration["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (configuration["draft_vocab_size"], configuration["rope_theta"]) == (DRAFTED, 50000.0)
    assert configuration["norm_output"] is configuration["norm_before_fc"] is True


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"norm_before_residual": True}, "--no-norm-before-residual"),
        ({"decoder": {"layer_types": ["sliding_attention"], "sliding_window": 2048}}, "--full-attention-indices 0"),
        ({"embed_requires_grad": True}, "embeddings of its own"),
        ({"decoder": {"model_type": "qwen3"}}, "--draft-arch llama"),
    ],
)
def test_what_sglang_would_serve_wrongly_without_an_error_is_refused(checkpoint, tmp_path, changed, said):
    write_configuration(checkpoint, **changed)
    with pytest.raises(Failed, match=said):
        export(checkpoint, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_tensor_that_sglang_would_skip_or_miss_is_named(checkpoint, tmp_path):
    rewrite(checkpoint, **{"extra.weight": torch.zeros(2), "fc.weight": None, "norm.weight": torch.zeros(3)})
    with pytest.raises(Failed) as failure:
        export(checkpoint, tmp_path / "drafter")
    for said in ("extra.weight: found (2,), expected None", "fc.weight: found None", "norm.weight: found (3,)"):
        assert said in str(failure.value)


def test_a_drafter_with_nan_is_not_exported(checkpoint, tmp_path):
    rewrite(checkpoint, **{"norm.weight": torch.full((HIDDEN,), float("nan"), dtype=torch.bfloat16)})
    with pytest.raises(Failed, match=r"not finite: norm\.weight"):
        export(checkpoint, tmp_path / "drafter")


def test_a_tensor_that_reads_back_changed_is_named():
    with pytest.raises(Failed, match=r"equal: a, c"):
        compare(
            {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(1)}, {"a": torch.ones(2), "b": torch.ones(2)}, "x"
        )


@pytest.mark.parametrize(
    ("model_type", "layers", "ids"),
    [
        ("llama", [2, 16, 29], [1, 15, 28]),
        ("llama", [1, 3, 5], [0, 2, 4]),
        ("kimi_k25", [2, 30, 58], [1, 29, 57]),  # SGLang adds 1 where the first is 1
        ("deepseek_v3", [3, 30, 58], [3, 30, 58]),  # and takes others as they are
    ],
)
def test_sglang_captures_the_layers_that_were_trained_on(model_type, layers, ids):
    assert serving_layer_ids(layers, model_type) == ids


def test_layers_that_sglang_would_capture_one_too_late_are_refused():
    with pytest.raises(Failed, match="capture from layer 2"):
        serving_layer_ids([1, 30, 58], "kimi_k25")


def test_a_drafter_of_other_than_three_layers_is_not_for_vllm(checkpoint, tmp_path):
    write_configuration(checkpoint, eagle_aux_hidden_state_layer_ids=[2, 5])
    with pytest.raises(Failed, match=r"layers \[2, 5\]: vLLM serves drafters of exactly 3 layers"):
        export_for_vllm(checkpoint, tmp_path / "vllm", verifier=tmp_path, stub=tmp_path)
    assert not (tmp_path / "vllm").exists()


def test_vllm_is_told_of_the_verifier_that_is_served_and_of_no_code(tmp_path):
    trained = {
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "stub", "architectures": ["Llama"]}},
        "draft_vocab_size": 6,
    }
    written = with_verifier(trained, tmp_path / "verifier")
    assert written == {
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": str(tmp_path / "verifier"), "architectures": ["Llama"]},
        },
        "draft_vocab_size": 6,
    }
