"""Bytes of a model's weights: on disk, or estimated from its configuration; in all, and on the fullest GPU.

What tensor parallelism divides and what every rank holds follows SGLang 0.5.23's model code: projections with heads,
feed-forward matrices, experts and embeddings are divided; norms, routers and the down-projections of latent attention
are held whole, and so are key/value heads where there are fewer of them than ranks.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.errors import BadInput
from aerie.serving.attention import LATENT_TYPES, head_width, key_value_heads
from aerie.serving.checkpoint_files import INDEX_FILE, verify_checkpoint
from aerie.serving.model_config import ModelConfig

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

EXPERT_COUNT_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Names of the number of routed experts: DeepSeek, Kimi and GLM; Qwen; Mixtral, gpt-oss and MiniMax."""

SPARSE_TYPES = frozenset(
    {"deepseek_v3", "glm4_moe", "gpt_oss", "kimi_k2", "minimax_m2", "mixtral", "qwen2_moe", "qwen3_moe"}
)
"""Families that have experts: without their number the weights would be counted as a small dense model's."""

SCALE_GROUP_DEFAULTS: Mapping[str, int] = {"gptq": 128, "awq": 128, "compressed-tensors": 128}
LINEAR = ("attention", "dense", "shared", "expert")
"""Parts whose matrices a quantisation applies to unless it leaves them out."""


@dataclass(frozen=True)
class Ranks:
    """How the ranks of one replica divide a model; ``attention`` ranks share one attention group's heads."""

    tensor: int
    attention: int
    stages: int = 1


@dataclass(frozen=True)
class Part:
    """A part of the model: its parameters in all, on one rank, and how many bytes each takes."""

    name: str
    parameters: float
    on_one_rank: float
    bytes_each: float


@dataclass(frozen=True)
class WeightEstimate:
    """Weights from the configuration: bytes in all, on the fullest rank, and parameters in all."""

    total_bytes: float
    rank_bytes: float
    parameters: float

    @property
    def rank_share(self) -> float:
        """Share of all bytes on the fullest rank: more than one part in so many ranks, where some are copies."""
        return self.rank_bytes / self.total_bytes


def weights_on_disk(folder: Path) -> int | None:
    """Bytes of a checkpoint's safetensors, by its index or else its files; None where it has none.

    Raises:
        BadInput: the index is there, and is none or has nonsense for a size; or without one, the files are not whole.
    """
    index = folder / INDEX_FILE
    if index.exists():
        try:
            metadata = json.loads(index.read_bytes()).get("metadata") or {}
            size = metadata.get("total_size")
        except OSError as error:
            raise BadInput(f"{index}: cannot be read: {error.strerror}") from error
        except (ValueError, AttributeError, RecursionError) as error:
            raise BadInput(f"{index}: not an index of weights: {error}; get the checkpoint's files again") from error
        if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < math.inf:
            return int(size)
        if size is not None:
            raise BadInput(f"{index}: metadata.total_size is {size!r}: expected the bytes of all weights")
    files = list(folder.glob("*.safetensors"))
    if files and (problems := verify_checkpoint(folder)):
        raise BadInput(f"{problems[0]}; get the checkpoint's files again")
    return sum(path.stat().st_size for path in files) or None


def estimate_weights(config: ModelConfig, ranks: Ranks, *, dtype: str) -> WeightEstimate:
    """Weights of a model, from its configuration alone.

    Raises:
        BadInput: a field is missing or makes no sense, or the quantisation is not known; the message names it.
    """
    parts = list(_parts(config, ranks, _Quantisation.of(config, DTYPE_BYTES[dtype])))
    return WeightEstimate(
        total_bytes=sum(part.parameters * part.bytes_each for part in parts),
        rank_bytes=sum(part.on_one_rank * part.bytes_each for part in parts),
        parameters=sum(part.parameters for part in parts if part.name != "absorbed"),
    )


def _parts(config: ModelConfig, ranks: Ranks, quantised: "_Quantisation") -> Iterator[Part]:
    hidden, vocabulary = config.count("hidden_size"), config.count("vocab_size")
    layers = config.count("num_hidden_layers")
    stage_share = math.ceil(layers / ranks.stages) / layers
    embedding = hidden * vocabulary
    heads = 1 if config.flag("tie_word_embeddings") else 2
    # With stages of a pipeline, the embedding is on the first and the output head on the last.
    on_one = embedding * (heads if ranks.stages == 1 else 1) / ranks.tensor
    yield Part("embedding", embedding * heads, on_one, quantised.plain)
    attention, on_one = _attention(config, 1), _attention(config, ranks.attention)
    yield Part("attention", attention * layers, on_one * layers * stage_share, quantised.bytes_of("attention"))
    if config.model_type in LATENT_TYPES:  # SGLang keeps the absorbed form of kv_b_proj beside it
        absorbed = _absorbed(config) * layers
        yield Part("absorbed", 0, absorbed / ranks.attention * stage_share, quantised.plain)
    yield Part("norms", 2 * hidden * layers, 2 * hidden * layers * stage_share, quantised.plain)
    sparse = _sparse_layers(config, layers)
    stage_layers = math.ceil(layers / ranks.stages)
    sparse_here = min(sparse, stage_layers)
    dense = 3 * hidden * config.count("intermediate_size") if sparse < layers else 0
    yield Part(
        "dense",
        dense * (layers - sparse),
        dense * (stage_layers - sparse_here) / ranks.tensor,
        quantised.bytes_of("dense"),
    )
    if sparse:
        yield from _experts(config, ranks, quantised, sparse=sparse, sparse_here=sparse_here)
    if vision := config.mapping("vision_config"):
        tower = _vision(ModelConfig(f"{config.where}: vision_config", vision, vision))
        yield Part("vision", tower, tower, quantised.plain)


def _experts(
    config: ModelConfig, ranks: Ranks, quantised: "_Quantisation", *, sparse: int, sparse_here: int
) -> Iterator[Part]:
    hidden, experts = config.count("hidden_size"), expert_count(config)
    width = config.count("moe_intermediate_size" if config.has("moe_intermediate_size") else "intermediate_size")
    expert = 3 * hidden * width * experts
    # Divided by experts, by their width, or both: one rank holds the same.
    yield Part("expert", expert * sparse, expert * sparse_here / ranks.tensor, quantised.bytes_of("expert"))
    shared = 3 * hidden * _shared_width(config, width)
    yield Part("shared", shared * sparse, shared * sparse_here / ranks.tensor, quantised.bytes_of("shared"))
    router = hidden * experts
    yield Part("router", router * sparse, router * sparse_here, quantised.plain)


def expert_count(config: ModelConfig) -> int:
    """Routed experts of a layer; 0 for a dense model.

    Raises:
        BadInput: the field makes no sense, or is missing in a family that has experts; the message names it.
    """
    for name in EXPERT_COUNT_FIELDS:
        if config.has(name):
            return config.count(name, least=0)
    if config.model_type in SPARSE_TYPES:
        raise BadInput(
            f"{config.where}: the number of experts is missing: expected one of {', '.join(EXPERT_COUNT_FIELDS)}"
        )
    return 0


def _shared_width(config: ModelConfig, width: int) -> int:
    if config.has("shared_expert_intermediate_size"):
        return config.count("shared_expert_intermediate_size", least=0)
    return width * config.count("n_shared_experts", default=0, least=0)


def _sparse_layers(config: ModelConfig, layers: int) -> int:
    """Layers with experts."""
    if not expert_count(config):
        return 0
    first = config.count("first_k_dense_replace", default=0, least=0)
    every = config.count("decoder_sparse_step" if config.has("decoder_sparse_step") else "moe_layer_freq", default=1)
    dense = config.fields.get("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or not all(isinstance(layer, int) for layer in dense):
        raise BadInput(f"{config.where}: mlp_only_layers is {dense!r}: expected a list of layers")
    return sum(
        index >= first and (index + (1 if config.has("decoder_sparse_step") else 0)) % every == 0 and index not in dense
        for index in range(layers)
    )


def _attention(config: ModelConfig, ranks: int) -> float:
    """Parameters of one layer's attention on one rank: its share of what is divided, and what it holds whole."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.model_type not in LATENT_TYPES:
        width = head_width(config)
        shared = max(1.0, key_value_heads(config) / ranks)
        return 2 * hidden * width * (heads / ranks + shared)
    rope = config.count("qk_rope_head_dim")
    query_width = heads * (config.count("qk_nope_head_dim") + rope)
    latent = config.count("kv_lora_rank")
    query_rank = config.count("q_lora_rank", default=0, least=0)
    divided = (query_rank or hidden) * query_width + _absorbed(config) + heads * config.count("v_head_dim") * hidden
    return divided / ranks + hidden * (query_rank + latent + rope)


def _absorbed(config: ModelConfig) -> int:
    widths = config.count("qk_nope_head_dim") + config.count("v_head_dim")
    return config.count("kv_lora_rank") * config.count("num_attention_heads") * widths


def _vision(vision: ModelConfig) -> int:
    """Parameters of a vision tower, which every rank holds: transformer layers, whatever else there is left out."""
    for prefix in ("", "vt_"):
        if vision.has(f"{prefix}hidden_size"):
            hidden = vision.count(f"{prefix}hidden_size")
            inner = vision.count(f"{prefix}intermediate_size", default=4 * hidden)
            depth = vision.count(f"{prefix}num_hidden_layers", default=vision.count("depth", default=24))
            return depth * (4 * hidden * hidden + 2 * hidden * inner)
    return 0


@dataclass(frozen=True)
class _Quantisation:
    """Bytes of a parameter, by the part of the model that it belongs to."""

    plain: float
    quantised: float
    parts: frozenset[str]

    @classmethod
    def of(cls, config: ModelConfig, plain: int) -> "_Quantisation":
        document = config.mapping("quantization_config")
        if not document:
            return cls(plain, plain, frozenset())
        where = f"{config.where}: quantization_config"
        method = document.get("quant_method")
        left_out = document.get("ignore") or document.get("modules_to_not_convert") or ()
        if not isinstance(left_out, Sequence) or not all(isinstance(one, str) for one in left_out):
            raise BadInput(f"{where}: ignore or modules_to_not_convert is {left_out!r}: expected a list of names")
        parts = frozenset(part for part in LINEAR if not any(_names(pattern, part) for pattern in left_out))
        return cls(plain, _quantised_bytes(where, method, document, plain), parts)

    def bytes_of(self, part: str) -> float:
        return self.quantised if part in self.parts else self.plain


def _quantised_bytes(where: str, method: Any, document: Mapping[str, Any], plain: int) -> float:
    if method == "mxfp4":
        return 0.5 + 1 / 32
    if method == "fp8":
        block = document.get("weight_block_size") or ()
        if not isinstance(block, Sequence) or not all(isinstance(size, int) and size > 0 for size in block):
            raise BadInput(f"{where}.weight_block_size is {block!r}: expected two sizes above 0")
        return 1 + 4 / math.prod(block) if block else 1.0
    if method == "compressed-tensors":
        groups = document.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if not isinstance(weights, Mapping):
            raise BadInput(f"{where}.config_groups is {groups!r}: expected how the weights are packed")
    elif isinstance(method, str) and method in SCALE_GROUP_DEFAULTS:
        weights = {"num_bits": document.get("bits"), "group_size": document.get("group_size")}
    else:
        raise BadInput(
            f"{where}.quant_method is {method!r}, which the planner does not know: expected fp8, mxfp4, gptq, awq or "
            "compressed-tensors, or the weights given (--weights-gib)"
        )
    bits, group = weights.get("num_bits"), weights.get("group_size") or SCALE_GROUP_DEFAULTS[str(method)]
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in (2, 3, 4, 8):
        raise BadInput(f"{where}: num_bits (or bits) of the weights is {bits!r}: expected 2, 3, 4 or 8")
    if not isinstance(group, int):
        raise BadInput(f"{where}: group_size is {group!r}: expected the weights that share a scale, or -1 for a row")
    return bits / 8 + (plain / group if group > 0 else 0.0)


_EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "attention": ("model.layers.9.self_attn.o_proj", "self_attn"),
    "dense": ("model.layers.9.mlp.down_proj",),
    "shared": ("model.layers.9.mlp.shared_experts.down_proj",),
    "expert": ("model.layers.9.mlp.experts.9.down_proj",),
}
"""Modules that stand for a part, to hold a quantisation's exceptions against."""


def _names(pattern: str, part: str) -> bool:
    """Whether an exception of a quantisation covers a part: a name, or ``re:`` and an expression."""
    names = _EXAMPLES[part]
    if pattern.startswith("re:"):
        try:
            return any(re.search(pattern.removeprefix("re:"), name) for name in names)
        except re.error as error:
            raise BadInput(f"quantization_config: {pattern!r} is no regular expression: {error}") from error
    plain = re.sub(r"\.(\d+|\*)\.", ".9.", pattern.removeprefix("language_model."))
    return any(name == plain or name.startswith(f"{plain}.") for name in names)
