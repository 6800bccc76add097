"""KV bytes per token by kind of attention, and configurations that make no sense."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.errors import BadInput
from aerie.serving.attention import FULL_TYPES, LATENT_TYPES, attention_of, kv_dtype_bytes
from aerie.serving.errors import PlanRefused
from aerie.serving.model_config import ModelConfig, read_model_config
from tests.serving.shapes import published

BF16, FP8 = 70_272, 35_136
POWERS = st.sampled_from([1, 2, 4, 8, 16])


@pytest.mark.parametrize("name", ["kimi_k25", "kimi_k2", "kimi_k2_thinking", "deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_latent_cache_is_replicated_on_every_rank(name: str, ranks: int) -> None:
    attention = attention_of(published(name), ranks=ranks)
    assert attention.kind == "MLA"
    assert attention.bytes_per_token(2) == BF16
    assert attention.bytes_per_token(1) == FP8


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("llama_31_8b", 1, 2 * 8 * 128 * 32 * 2),
        ("llama_31_8b", 8, 2 * 1 * 128 * 32 * 2),
        ("llama_31_8b", 16, 2 * 1 * 128 * 32 * 2),
        ("llama_31_70b", 4, 2 * 2 * 128 * 80 * 2),
        ("qwen3_8b", 1, 2 * 8 * 128 * 36 * 2),
        ("qwen3_235b_a22b", 8, 2 * 1 * 128 * 94 * 2),
        ("glm_45", 8, 2 * 1 * 128 * 92 * 2),
        ("minimax_m2", 4, 2 * 2 * 128 * 62 * 2),
    ],
)
def test_grouped_heads_are_divided_then_replicated(name: str, ranks: int, expected: int) -> None:
    attention = attention_of(published(name), ranks=ranks)
    assert attention.kind == "GQA"
    assert attention.bytes_per_token(2) == expected


@pytest.mark.parametrize(("family", "kind"), [("llama", "MHA"), ("qwen3", None), ("mistral", None), ("glm4_moe", None)])
def test_missing_key_value_heads_are_all_heads_only_where_that_is_the_familys_default(
    family: str, kind: str | None
) -> None:
    fields = {name: value for name, value in published("llama_31_8b").fields.items() if name != "num_key_value_heads"}
    config = ModelConfig.of({**fields, "model_type": family})
    if kind is not None:
        assert attention_of(config, ranks=1).kind == kind
        return
    with pytest.raises(BadInput, match="num_key_value_heads is missing"):
        attention_of(config, ranks=1)


def test_replication_is_said() -> None:
    assert "4 KV heads on 8 ranks, so each is held by 2" in attention_of(published("qwen3_235b_a22b"), ranks=8).explain(
        2
    )


def test_without_groups_every_head_counts() -> None:
    config = published("llama_31_8b", num_key_value_heads=...)
    attention = attention_of(config, ranks=1)
    assert (attention.kind, attention.bytes_per_token(4)) == ("MHA", 2 * 32 * 128 * 32 * 4)


def test_a_windowed_layer_counts_as_what_its_pool_holds_and_it_is_said_how() -> None:
    attention = attention_of(published("gpt_oss_120b"), ranks=8)
    assert attention.window_layers == 18
    assert attention.bytes_per_token(2) == math.ceil(2 * 1 * 64 * 2 * (18 + 0.8 * 18))
    assert "18 of 36 layers keep 128 tokens of a request" in attention.explain(2)
    assert attention_of(published("gpt_oss_120b", layer_types=...), ranks=8) == attention


def test_a_window_without_a_pool_of_its_own_saves_nothing_and_that_is_said() -> None:
    whole, windowed = published("llama_31_8b"), published("llama_31_8b", sliding_window=4096)
    assert attention_of(windowed, ranks=1).bytes_per_token(2) == attention_of(whole, ranks=1).bytes_per_token(2)
    assert "all layers count whole" in attention_of(windowed, ranks=1).explain(2)
    assert "sliding" not in attention_of(published("qwen3_8b", use_sliding_window=False), ranks=1).explain(2)


def test_the_largest_stage_of_a_pipeline_decides() -> None:
    attention = attention_of(published("kimi_k25"), ranks=8)
    assert attention.bytes_per_token(2, stages=2) == 576 * 31 * 2


@given(layers=st.integers(1, 200), stages=st.integers(1, 16), heads=POWERS, group=POWERS, ranks=POWERS, width=POWERS)
def test_ranks_and_stages_together_hold_at_least_all_heads(
    layers: int, stages: int, heads: int, group: int, ranks: int, width: int
) -> None:
    if (heads * group) % ranks:
        return
    document = {
        "model_type": "qwen3", "num_hidden_layers": layers, "num_attention_heads": heads * group,
        "num_key_value_heads": heads, "head_dim": width,
    }  # fmt: skip
    one = attention_of(ModelConfig.of(document), ranks=1).bytes_per_token(2)
    part = attention_of(ModelConfig.of(document), ranks=ranks).bytes_per_token(2, stages=stages)
    assert one == 2 * heads * width * layers * 2
    assert one / (ranks * stages) <= part <= one
    assert part * ranks * stages >= one


@pytest.mark.parametrize("ranks", [3, 6, 64])
def test_heads_that_cannot_be_divided_are_refused(ranks: int) -> None:
    with pytest.raises(PlanRefused, match=r"num_attention_heads 32|num_key_value_heads 8"):
        attention_of(published("llama_31_8b"), ranks=ranks)


@pytest.mark.parametrize("kind", ["mamba2", "deepseek_v32", "kimi_linear", "gemma3_text", "qwen3_next", "rwkv"])
def test_an_unknown_attention_is_refused_by_name_and_not_guessed(kind: str) -> None:
    with pytest.raises(PlanRefused, match=f"model_type '{kind}' has an attention that the planner does not know"):
        attention_of(published("llama_31_8b", model_type=kind), ranks=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 31 + ["linear_attention"]}, "layer_types has linear_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
        ({"layer_types": "full"}, "layer_types is 'full'"),
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7"),
        ({"head_dim": ..., "hidden_size": 4097}, "head_dim is missing, and hidden_size 4097"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": 3}, "model_type is 3"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        attention_of(published("llama_31_8b", **changes), ranks=1)


FIELDS = {
    "llama_31_8b": ("num_hidden_layers", "num_attention_heads"),
    "kimi_k25": ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"),
    "gpt_oss_120b": ("num_hidden_layers", "num_attention_heads", "sliding_window"),
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in FIELDS.items() for field in fields])
@pytest.mark.parametrize("value", [..., None, 0, -1, 2.5, float("nan"), float("inf"), "32", True, [32]])
def test_a_missing_field_or_a_nonsense_number_is_one_line_that_names_it(name: str, field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"config\.json.*: {field} is ") as caught:
        attention_of(published(name, **{field: value}), ranks=1)
    assert "\n" not in str(caught.value)


ANYTHING = st.one_of(
    st.integers(), st.floats(), st.sampled_from([None, "", "8", True, [1], {}, *sorted(LATENT_TYPES | FULL_TYPES)])
)
NAMES = st.sampled_from(sorted({*FIELDS["kimi_k25"], "num_key_value_heads", "head_dim", "model_type"}))


@given(st.dictionaries(NAMES, ANYTHING))
def test_whatever_a_configuration_holds_there_is_an_answer_or_our_error(document: dict[str, Any]) -> None:
    try:
        assert attention_of(ModelConfig.of(document), ranks=1).bytes_per_token(2) > 0
    except BadInput as error:
        assert str(error).startswith("config.json")


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_configuration_that_is_no_object_is_refused(document: Any) -> None:
    with pytest.raises(BadInput, match="expected an object"):
        ModelConfig.of(document)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Any) -> None:
    with pytest.raises(BadInput, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"config\.json: not JSON"):
        read_model_config(tmp_path)


def test_kv_type_follows_the_model_unless_named() -> None:
    assert kv_dtype_bytes("auto", "float32") == 4
    assert kv_dtype_bytes("fp8_e4m3", "bfloat16") == 1
    with pytest.raises(PlanRefused, match="int3"):
        kv_dtype_bytes("int3", "bfloat16")
