"""The planner's arithmetic against figures measured on the reference deployment (8 GPUs, Kimi-K2.5)."""

import pytest

from aerie.serving.errors import PlanRefused
from aerie.serving.memory import (
    PoolLine,
    PoolRow,
    bytes_per_token,
    hicache_safe_gb_per_rank,
    kv_dtype_bytes,
    require_hicache_fits,
)

KIMI = {
    "model_type": "kimi_k25",
    "text_config": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64},
}
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
BF16, FP8 = 70_272, 35_136
MEASURED = (
    PoolRow(0.85, 116_171, BF16),
    PoolRow(0.88, 159_277, BF16),
    PoolRow(0.93, 231_120, BF16),
    PoolRow(0.90, 376_029, FP8),
)


def test_latent_cache_is_replicated_on_every_rank() -> None:
    assert bytes_per_token(KIMI, dtype_bytes=2, ranks=8) == BF16
    assert bytes_per_token(KIMI, dtype_bytes=2, ranks=1) == BF16
    assert bytes_per_token(KIMI, dtype_bytes=1, ranks=8) == FP8


@pytest.mark.parametrize(("ranks", "heads_per_rank"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_grouped_heads_are_divided_then_replicated(ranks: int, heads_per_rank: int) -> None:
    assert bytes_per_token(LLAMA_8B, dtype_bytes=2, ranks=ranks) == 2 * heads_per_rank * 128 * 32 * 2


def test_without_groups_every_head_counts() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert bytes_per_token(config, dtype_bytes=4, ranks=1) == 2 * 4 * 16 * 2 * 4


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(PlanRefused, match="8 key/value heads cannot be shared by 3 ranks"):
        bytes_per_token(LLAMA_8B, dtype_bytes=2, ranks=3)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt_oss"},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 4096},
    ],
)
def test_an_unknown_attention_is_refused_not_guessed(change: dict[str, object]) -> None:
    with pytest.raises(PlanRefused, match="the planner"):
        bytes_per_token({**LLAMA_8B, **change}, dtype_bytes=2, ranks=1)


def test_a_sliding_window_that_is_switched_off_is_none() -> None:
    config = {**LLAMA_8B, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert bytes_per_token(config, dtype_bytes=2, ranks=1) == 131_072


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_any_two_measured_rows_give_the_other_two(first: int, second: int) -> None:
    if first == second:
        with pytest.raises(PlanRefused, match="give no line"):
            PoolLine.through(MEASURED[first], MEASURED[second])
        return
    line = PoolLine.through(MEASURED[first], MEASURED[second])
    for row in MEASURED:
        assert line.tokens(row.fraction, row.bytes_per_token) == pytest.approx(row.tokens, rel=1e-3)


def test_kv_type_follows_the_model_unless_named() -> None:
    assert kv_dtype_bytes("auto", "float32") == 4
    assert kv_dtype_bytes("fp8_e4m3", "bfloat16") == 1
    with pytest.raises(PlanRefused, match="fp4_e2m1"):
        kv_dtype_bytes("fp4_e2m1", "bfloat16")


def test_safe_hierarchical_cache_is_that_of_the_reference() -> None:
    assert hicache_safe_gb_per_rank(available_gb=445, loading_gb=40, ranks=8) == 48
    assert hicache_safe_gb_per_rank(available_gb=30, loading_gb=40, ranks=8) == 0
    require_hicache_fits(48, available_gb=445, loading_gb=40, ranks=8)


def test_a_size_per_rank_that_was_meant_for_the_host_is_refused_with_the_sum() -> None:
    with pytest.raises(PlanRefused, match=r"8 ranks x 300 GB = 2400 GB.* 445 GB available.* = 48"):
        require_hicache_fits(300, available_gb=445, loading_gb=40, ranks=8)
