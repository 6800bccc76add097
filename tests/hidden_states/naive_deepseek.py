"""A DeepSeek-V3 in float32, from its weights alone: latent attention written out, and experts one token at a time."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .naive_llama import rms_norm


def yarn_frequencies(rope: dict[str, Any], size: int) -> torch.Tensor:
    """Frequencies [size / 2]: fast ones as trained, slow ones divided by the factor, a ramp between."""
    theta, trained = rope["rope_theta"], rope["original_max_position_embeddings"]

    def pair(rotations):
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(rope["beta_fast"])), 0)
    high = min(math.ceil(pair(rope["beta_slow"])), size - 1)
    slow = ((torch.arange(size // 2) - low) / (high - low)).clamp(0, 1)
    plain = theta ** -(torch.arange(0, size, 2) / size)
    return plain * (1 - slow) + plain / rope["factor"] * slow


def rotated(x, frequencies):
    """Rotary embedding of x [S, heads, D], pairs side by side as the checkpoint has them."""
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def gated(x, of, name):
    """A feed-forward network of x [..., H]."""
    return (torch.nn.functional.silu(x @ of[f"{name}.gate_proj"].T) * (x @ of[f"{name}.up_proj"].T)) @ of[
        f"{name}.down_proj"
    ].T


def experts(x, of, config):
    """The experts of each token of x [S, H]: one group, the best by score and bias, weighted by score."""
    result = gated(x, of, "mlp.shared_experts")
    for token, scores in enumerate((x @ of["mlp.gate"].T).sigmoid()):
        chosen = (scores + of["mlp.gate.e_score_correction_bias"]).topk(config["num_experts_per_tok"]).indices
        weights = scores[chosen] / scores[chosen].sum() * config["routed_scaling_factor"]
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            result[token] += weight * gated(x[token], of, f"mlp.experts.{expert}")
    return result


def residual_streams(folder: Path, ids: list[int]) -> torch.Tensor:
    """Residual streams entering each layer, then the last layer's output before the norm: [layers + 1, S, H]."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    heads, epsilon, rope = config["num_attention_heads"], config["rms_norm_eps"], config["rope_scaling"]
    plain, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    frequencies = yarn_frequencies(rope, turned)
    scale = (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2 / (plain + turned) ** 0.5
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
    stream, streams = weights["model.embed_tokens.weight"][ids], []
    for layer in range(config["num_hidden_layers"]):
        streams.append(stream)
        of = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = rms_norm(stream, of["input_layernorm"], epsilon)
        latent = rms_norm(x @ of["self_attn.q_a_proj"].T, of["self_attn.q_a_layernorm"], epsilon)
        q = (latent @ of["self_attn.q_b_proj"].T).view(len(ids), heads, plain + turned)
        latent, k_turned = (x @ of["self_attn.kv_a_proj_with_mqa"].T).split([config["kv_lora_rank"], turned], dim=-1)
        latent = rms_norm(latent, of["self_attn.kv_a_layernorm"], epsilon)
        k, v = (latent @ of["self_attn.kv_b_proj"].T).view(len(ids), heads, plain + value).split([plain, value], dim=-1)
        k_turned = rotated(k_turned[:, None], frequencies).expand(-1, heads, -1)
        q = torch.cat([q[..., :plain], rotated(q[..., plain:], frequencies)], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, torch.cat([k, k_turned], dim=-1)) * scale + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
        stream = stream + mixed @ of["self_attn.o_proj"].T
        x = rms_norm(stream, of["post_attention_layernorm"], epsilon)
        dense = layer < config["first_k_dense_replace"]
        stream = stream + (gated(x, of, "mlp") if dense else experts(x, of, config))
    return torch.stack([*streams, stream])
