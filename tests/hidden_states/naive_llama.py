"""A Llama in a few lines of float32, from its weights alone: what both back ends are held against."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def rms_norm(x, weight, epsilon):
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotated(x, theta):
    """Rotary embedding of x [S, heads, D], halves as the checkpoint has them."""
    size = x.shape[-1]
    angles = torch.arange(len(x))[:, None] / theta ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def residual_streams(folder: Path, ids: list[int]) -> torch.Tensor:
    """Residual streams entering each layer, then the last layer's output before the norm: [layers + 1, S, H]."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    heads, groups, epsilon = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    size = config["hidden_size"] // heads
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
    stream, streams = weights["model.embed_tokens.weight"][ids], []
    for layer in range(config["num_hidden_layers"]):
        streams.append(stream)
        of = {
            name.split(f"layers.{layer}.")[1].removesuffix(".weight"): weight
            for name, weight in weights.items()
            if f"layers.{layer}." in name
        }
        x = rms_norm(stream, of["input_layernorm"], epsilon)
        q, k, v = (
            (x @ of[f"self_attn.{name}_proj"].T).view(len(ids), count, size)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = rotated(q, theta), rotated(k, theta)
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
        stream = stream + mixed @ of["self_attn.o_proj"].T
        x = rms_norm(stream, of["post_attention_layernorm"], epsilon)
        gated = torch.nn.functional.silu(x @ of["mlp.gate_proj"].T) * (x @ of["mlp.up_proj"].T)
        stream = stream + gated @ of["mlp.down_proj"].T
    return torch.stack([*streams, stream])
