"""What an EAGLE-3 drafter takes on each GPU beside its verifier: one decoder layer over doubled inputs."""

from dataclasses import dataclass

from aerie.serving.attention import LATENT_TYPES, head_width
from aerie.serving.model_config import ModelConfig

AUXILIARY_LAYERS = 3
"""Hidden states of the verifier that ``fc`` joins; the embedding is the verifier's own."""


@dataclass(frozen=True)
class DrafterSize:
    """Bytes on one rank: of the weights, and of one token's keys and values in the drafter's own cache."""

    parameters: int
    weights_bytes: float
    kv_elements: int
    explanation: str


def size_drafter(
    config: ModelConfig, *, ranks: int, draft_vocabulary: int, intermediate_size: int | None, dtype_bytes: int
) -> DrafterSize:
    """Size of a drafter with the heads and widths of ``config``: its own, or its verifier's where there is none yet.

    ``fc`` and the norms are held whole by every rank, the rest is divided (SGLang's ``llama_eagle3``).

    Raises:
        BadInput: a field is missing or makes no sense; the message names it.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    key_heads = config.count("num_key_value_heads", default=heads)
    width = hidden // heads if config.model_type in LATENT_TYPES else head_width(config)
    inner = intermediate_size or config.count("intermediate_size")
    join = AUXILIARY_LAYERS * hidden * hidden
    attention = 2 * hidden * width * heads + 2 * hidden * width * key_heads * 2 + heads * width * hidden
    feed_forward, head = 3 * hidden * inner, hidden * draft_vocabulary
    divided = attention + feed_forward + head
    return DrafterSize(
        parameters=join + divided,
        weights_bytes=(join + divided / ranks) * dtype_bytes,
        kv_elements=2 * max(1, key_heads // ranks) * width,
        explanation=(
            f"fc {join / 1e6:,.0f}M on every rank + (attention {attention / 1e6:,.0f}M + feed-forward "
            f"{feed_forward / 1e6:,.0f}M + head {head / 1e6:,.0f}M) / {ranks}, x {dtype_bytes} bytes"
        ),
    )
