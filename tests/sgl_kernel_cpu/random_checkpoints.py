"""Tiny checkpoints with seeded random weights: a Llama, a DeepSeek-V3 (latent attention and experts), a drafter.

Weights are drawn wide (standard deviation 0.2), so that the two best logits of a step are far apart next to rounding
and greedy decoding has one answer. A token is drawn to itself (`STICKINESS`), so that greedy output has runs, which the
drafter below can guess: drafts are then both accepted and rejected.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 256
HIDDEN = 64
STICKINESS = 0.5
EMBEDDING_SCALE = 12.0
FIRST_PLAIN_TOKEN = 3  # 0 to 2: padding, begin, end
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 8,  # the fewest whose default auxiliary layers are distinct and leave one over
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def _save(model: PreTrainedModel, folder: Path, more_config: dict[str, Any]) -> None:
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
        model.lm_head.weight.add_(embedding, alpha=STICKINESS)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more_config}))


def make_llama(folder: Path) -> None:
    """Grouped-query attention: 4 heads, 2 key/value heads."""
    torch.manual_seed(0)
    _save(LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=16)).float(), folder, {})


def make_deepseek(folder: Path) -> None:
    """Latent attention and routed experts, the shape of DeepSeek-V3 and Kimi-K2."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    config = DeepseekV3Config(
        **COMMON,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        rope_parameters=rope,
    )
    # SGLang reads the keys of the published checkpoints, some of which transformers no longer writes.
    published = {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {**rope, "type": "yarn"},
    }
    _save(DeepseekV3ForCausalLM(config).float(), folder, published)


def make_drafter(folder: Path, verifier: Path) -> None:
    """An EAGLE-3 drafter in SGLang's layout that mostly guesses "the same token again"."""
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    config = {
        **COMMON,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "head_dim": HIDDEN // 4,
        "draft_vocab_size": VOCABULARY // 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    embedding = _embedding_of(verifier)
    kept = torch.arange(0, VOCABULARY, 2)  # every other token can be drafted
    shapes = {
        "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj": (128, HIDDEN),
        "midlayer.mlp.up_proj": (128, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 128),
    }
    tensors = {f"{name}.weight": 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    for norm in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = torch.ones(HIDDEN)
    identity = torch.eye(HIDDEN)
    tensors["fc.weight"] = torch.cat((identity, torch.zeros_like(identity), torch.zeros_like(identity)), dim=1)
    tensors["lm_head.weight"] = embedding[kept]
    tensors["d2t"] = kept - torch.arange(kept.numel())
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, kept, True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _embedding_of(verifier: Path) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(verifier / "model.safetensors", framework="pt") as tensors:
        embedding: torch.Tensor = tensors.get_tensor("model.embed_tokens.weight")
    return embedding
