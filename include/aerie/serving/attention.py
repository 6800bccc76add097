"""KV bytes of one token on one GPU, by the verifier's kind of attention.

The rules are SGLang 0.5.23's own sizing (``model_executor/pool_configurator.py``). A model type that is not listed here
is an error: a guess would be a pool of the wrong size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aerie.errors import BadInput
from aerie.serving.errors import PlanRefused
from aerie.serving.model_config import ModelConfig

Kind = Literal["MHA", "GQA", "MQA", "MLA"]

LATENT_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"})
"""Families with multi-head latent attention: one latent vector a token, held whole by every rank."""

FULL_TYPES = frozenset(
    {
        "glm4", "glm4_moe", "llama", "minimax_m2", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_moe", "smollm3",
    }
)  # fmt: skip
"""Families whose every layer keeps keys and values of all tokens. Where such a model has a sliding window, attention
looks no further back, but SGLang's pool still holds every token."""

WINDOW_TYPES = frozenset({"gpt_oss"})
"""Families whose layers with a sliding window have a pool of their own in SGLang."""

UNGROUPED_BY_DEFAULT = frozenset({"llama", "phi3"})
"""Families where every head has keys and values of its own unless ``num_key_value_heads`` says otherwise; transformers
has some number of its own for the others, which says nothing of a checkpoint."""

OWN_HEAD_WIDTH = frozenset({"glm4", "gpt_oss", "minimax_m2", "qwen3"})
"""Families whose heads are not the hidden size divided: transformers has a number of its own where ``head_dim`` is
missing."""

WINDOW_POOL_RATIO = 0.8
"""``--swa-full-tokens-ratio``: tokens in the pool of windowed layers for each token in that of full layers."""

KV_DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "fp4_mx_block16": 0.5 + 1 / 16,
    "fp4_e2m1": 0.5 + 1 / 16,
}
"""Bytes of one element with its share of the scales: 32 elements share one in mxfp8, 16 in the 4-bit types."""


def kv_dtype_bytes(kv_cache_dtype: str, model_dtype: str) -> float:
    """Bytes per element of the KV cache; ``auto`` takes the model's type.

    Raises:
        PlanRefused: the type is not known.
    """
    name = model_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if name not in KV_DTYPE_BYTES:
        raise PlanRefused(f"kv_cache_dtype {name!r} is not known: expected auto or one of {', '.join(KV_DTYPE_BYTES)}")
    return KV_DTYPE_BYTES[name]


@dataclass(frozen=True)
class Attention:
    """What a token leaves in the KV cache: elements per layer and rank, and how many layers keep how much.

    ``layers`` are all of the model's; ``window_layers`` of them have a pool of their own, for ``window_tokens`` of each
    request. ``elements`` are those of one full layer on one rank, ``window_elements`` those of one windowed layer.
    """

    kind: Kind
    layers: int
    elements: int
    window_layers: int = 0
    window_tokens: int | None = None
    note: str = ""

    @property
    def counted_layers(self) -> float:
        """Layers that a token of the pool is paid for in: windowed ones at their pool's share."""
        return self.layers - self.window_layers + WINDOW_POOL_RATIO * self.window_layers

    def bytes_per_token(self, dtype_bytes: float, *, stages: int = 1) -> int:
        """KV bytes that one token takes on one GPU, with the layers divided among ``stages`` of a pipeline.

        Stages may differ by one layer; the largest counts, because it decides for all of them.
        """
        share = math.ceil(self.layers / stages) / self.layers
        return math.ceil(self.elements * self.counted_layers * share * dtype_bytes - 1e-6)

    def explain(self, dtype_bytes: float, *, stages: int = 1) -> str:
        """The sum behind ``bytes_per_token``, as a sentence."""
        layers = f"{self.counted_layers:g} layers"
        if stages > 1:
            layers = f"{math.ceil(self.layers / stages)} of {layers} (pipeline stage)"
        total = self.bytes_per_token(dtype_bytes, stages=stages)
        note = f"; {self.note}" if self.note else ""
        return f"{self.elements:,} values x {layers} x {dtype_bytes:g} bytes = {total:,} bytes{note}"


def attention_of(config: ModelConfig, *, ranks: int) -> Attention:
    """The attention of a model whose heads are shared by ``ranks`` ranks.

    Raises:
        PlanRefused: the model type is not known, or its heads cannot be shared so.
        BadInput: a field is missing or makes no sense; the message names it.
    """
    kind = config.model_type
    if kind in LATENT_TYPES:
        return _latent(config, ranks)
    if kind in FULL_TYPES | WINDOW_TYPES:
        return _heads(config, ranks)
    raise PlanRefused(
        f"{config.where}: model_type {kind!r} has an attention that the planner does not know: expected one of "
        f"{', '.join(sorted(LATENT_TYPES | FULL_TYPES | WINDOW_TYPES))}"
    )


def _latent(config: ModelConfig, ranks: int) -> Attention:
    _share(config.where, "num_attention_heads", config.count("num_attention_heads"), ranks)
    return Attention(
        kind="MLA",
        layers=config.count("num_hidden_layers"),
        elements=config.count("kv_lora_rank") + config.count("qk_rope_head_dim"),
        note="MLA: the latent vector is held whole by every rank" if ranks > 1 else "MLA: one latent vector a token",
    )


def _heads(config: ModelConfig, ranks: int) -> Attention:
    layers, query_heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    heads = key_value_heads(config)
    if query_heads % heads:
        raise BadInput(
            f"{config.where}: num_key_value_heads is {heads}: expected a divisor of num_attention_heads {query_heads}"
        )
    _share(config.where, "num_attention_heads", query_heads, ranks)
    if heads % ranks and ranks % heads:
        raise PlanRefused(
            f"{config.where}: num_key_value_heads {heads} cannot be shared by {ranks} ranks: one must divide the other"
        )
    windows, window, how = _windows(config, layers)
    kind: Kind = "MHA" if heads == query_heads else "MQA" if heads == 1 else "GQA"
    if heads < ranks:
        shared = f"{kind}: {heads} KV heads on {ranks} ranks, so each is held by {ranks // heads} of them"
    else:
        shared = f"{kind}: {heads} KV heads on {ranks} rank{'s' if ranks > 1 else ''}, {heads // ranks} on each"
    return Attention(
        kind=kind,
        layers=layers,
        elements=2 * max(1, heads // ranks) * head_width(config),
        window_layers=windows,
        window_tokens=window,
        note="; ".join(part for part in (shared, how) if part),
    )


def key_value_heads(config: ModelConfig) -> int:
    """Key/value heads: ``num_key_value_heads``, or all heads in the families whose default that is.

    Raises:
        BadInput: it is missing in a family that has another default, or makes no sense.
    """
    if config.model_type in UNGROUPED_BY_DEFAULT:
        return config.count("num_key_value_heads", default=config.count("num_attention_heads"))
    return config.count("num_key_value_heads")


def head_width(config: ModelConfig) -> int:
    """Size of one head: ``head_dim``, else the hidden size divided by the heads.

    Raises:
        BadInput: neither makes sense.
    """
    if config.has("head_dim") or config.model_type in OWN_HEAD_WIDTH:
        return config.count("head_dim")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden % heads:
        raise BadInput(
            f"{config.where}: head_dim is missing, and hidden_size {hidden} is no multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def _share(where: str, name: str, heads: int, ranks: int) -> None:
    if heads % ranks:
        raise PlanRefused(f"{where}: {name} {heads} cannot be shared by {ranks} ranks: expected a divisor of {heads}")


def _windows(config: ModelConfig, layers: int) -> tuple[int, int | None, str]:
    """Layers with a pool of their own, their window, and what is to be said of windows."""
    kinds = config.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise BadInput(f"{config.where}: layer_types has {len(kinds)} entries: expected num_hidden_layers, {layers}")
    if other := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise PlanRefused(
            f"{config.where}: layer_types has {', '.join(other)}: the planner knows full_attention and "
            "sliding_attention"
        )
    if config.model_type not in WINDOW_TYPES:
        return 0, None, _unused_window(config, kinds)
    window = config.count("sliding_window")
    count = (
        kinds.count("sliding_attention") if kinds else math.ceil(layers / 2)
    )  # as transformers defaults: every other
    if count == layers:
        raise PlanRefused(f"{config.where}: layer_types has no full_attention: the planner knows mixed layers only")
    how = (
        f"{count} of {layers} layers keep {window} tokens of a request: SGLang gives them a pool of "
        f"{WINDOW_POOL_RATIO:g} x the others' tokens, so they count as {WINDOW_POOL_RATIO * count:g} layers"
    )
    return count, window, how if count else ""


def _unused_window(config: ModelConfig, kinds: tuple[str, ...]) -> str:
    used: Any = config.fields.get("use_sliding_window", True)
    if "sliding_attention" in kinds or (not kinds and config.has("sliding_window") and used):
        return "it has a sliding window, but SGLang's pool holds every token of these layers: all layers count whole"
    return ""
