"""The arithmetic of a server's memory: bytes per token, tokens that fit, host memory of the hierarchical cache.

Sources: SGLang's own sizing (``max_total_num_tokens``) and four measured rows of an 8-GPU deployment of Kimi-K2.5,
which these formulas reproduce to within 0.1 %. GB is 10^9 bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.serving.errors import PlanRefused

KV_DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
HICACHE_SHARE = 0.95
"""Share of the host memory left by the loading model that the hierarchical caches of all ranks may take."""

FULL_ATTENTION_TYPES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"})
"""Model types whose every layer keeps keys and values of all tokens, shared over groups of heads or not."""


def kv_dtype_bytes(kv_cache_dtype: str, model_dtype: str) -> int:
    """Bytes per element of the KV cache; ``auto`` takes the model's type.

    Raises:
        PlanRefused: the type is not known.
    """
    name = model_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if name not in KV_DTYPE_BYTES:
        raise PlanRefused(f"kv_cache_dtype {name!r} is not known: expected one of {', '.join(KV_DTYPE_BYTES)}")
    return KV_DTYPE_BYTES[name]


def bytes_per_token(config: Mapping[str, Any], *, dtype_bytes: int, ranks: int) -> int:
    """Bytes of KV cache per token and rank, from a checkpoint's ``config.json``.

    A latent cache (MLA) is held whole by every rank. Otherwise the key/value heads are divided among the ranks; where
    there are fewer heads than ranks, they are replicated and each rank holds one.

    Raises:
        PlanRefused: the attention is of a kind that the planner does not know, or cannot be divided.
    """
    config = config.get("text_config") or config
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        return (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * layers * dtype_bytes
    _require_full_attention(config)
    query_heads = int(config["num_attention_heads"])
    heads = int(config.get("num_key_value_heads") or query_heads)
    if heads % ranks and ranks % heads:
        raise PlanRefused(f"{heads} key/value heads cannot be shared by {ranks} ranks: one must divide the other")
    width = int(config.get("head_dim") or int(config["hidden_size"]) // query_heads)
    return 2 * max(1, heads // ranks) * width * layers * dtype_bytes


def _require_full_attention(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in FULL_ATTENTION_TYPES:
        raise PlanRefused(
            f"config.json: model_type {kind!r} has an attention that the planner does not know: expected MLA "
            f"(kv_lora_rank) or one of {', '.join(sorted(FULL_ATTENTION_TYPES))}"
        )
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other or (config.get("sliding_window") and config.get("use_sliding_window", True)):
        raise PlanRefused(
            f"config.json: {kind} with {', '.join(other) or 'a sliding window'}: the planner knows full attention only"
        )


@dataclass(frozen=True)
class PoolRow:
    """What a server reported: its memory fraction, its ``max_total_num_tokens``, and the bytes per token of its KV."""

    fraction: float
    tokens: int
    bytes_per_token: int


@dataclass(frozen=True)
class PoolLine:
    """``tokens = (pool_bytes * fraction - static_bytes) / bytes_per_token``, for one model on one kind of GPU."""

    pool_bytes: float
    static_bytes: float

    @classmethod
    def through(cls, first: PoolRow, second: PoolRow) -> "PoolLine":
        """The line through two rows.

        Raises:
            PlanRefused: the rows have the same fraction.
        """
        if first.fraction == second.fraction:
            raise PlanRefused(f"two rows at mem_fraction_static {first.fraction} give no line: vary the fraction")
        first_bytes, second_bytes = (row.tokens * row.bytes_per_token for row in (first, second))
        pool = (second_bytes - first_bytes) / (second.fraction - first.fraction)
        return cls(pool_bytes=pool, static_bytes=pool * first.fraction - first_bytes)

    def tokens(self, fraction: float, bytes_per_token: int) -> int:
        """Tokens that the KV pool holds at a memory fraction."""
        return int((self.pool_bytes * fraction - self.static_bytes) / bytes_per_token)


def hicache_safe_gb_per_rank(*, available_gb: float, loading_gb: float, ranks: int) -> int:
    """The largest hierarchical cache per rank, in whole GB, that leaves the host its memory."""
    return max(0, math.floor(HICACHE_SHARE * (available_gb - loading_gb) / ranks))


def require_hicache_fits(size_gb_per_rank: int, *, available_gb: float, loading_gb: float, ranks: int) -> None:
    """Refuse a hierarchical cache that the host cannot hold; SGLang takes the size per rank, and ranks race for it.

    Raises:
        PlanRefused: all ranks together ask for more than is safe; the message shows the sum.
    """
    safe = hicache_safe_gb_per_rank(available_gb=available_gb, loading_gb=loading_gb, ranks=ranks)
    if size_gb_per_rank > safe:
        raise PlanRefused(
            f"hicache_size_gb_per_rank {size_gb_per_rank}: {ranks} ranks x {size_gb_per_rank} GB = "
            f"{ranks * size_gb_per_rank} GB, but the host has {available_gb:g} GB available, of which loading takes "
            f"{loading_gb:g} GB: expected at most "
            f"floor({HICACHE_SHARE} x ({available_gb:g} - {loading_gb:g}) / {ranks}) = {safe}"
        )
