import pytest

from aerie.errors import BadInput
from aerie.settings.bundled import MODELS_FOLDER, bundled_config, bundled_names
from aerie.settings.profile import load_profile, profile_names

SHAPES = {
    "deepseek_r1": (61, 7168, 129_280),
    "deepseek_v31": (61, 7168, 129_280),
    "deepseek_v3_0324": (61, 7168, 129_280),
    "glm_45": (92, 5120, 151_552),
    "gpt_oss": (36, 2880, 201_088),
    "kimi_k2": (61, 7168, 163_840),
    "kimi_k2_thinking": (61, 7168, 163_840),
    "kimi_k25": (61, 7168, 163_840),
    "llama_3": (32, 4096, 128_256),
    "minimax_m2": (62, 3072, 200_064),
    "qwen3": (36, 4096, 151_936),
    "llama_31_70b": (80, 8192, 128_256),
    "qwen3_235b_a22b": (94, 4096, 151_936),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_bundled_model_has_the_published_shape(name: str) -> None:
    config = bundled_config(name)
    text = config.get("text_config", config)
    assert (text["num_hidden_layers"], text["hidden_size"], text["vocab_size"]) == SHAPES[name]


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_names_a_model_of_its_own_family(name: str) -> None:
    profile = load_profile(name)
    if profile.model is not None:
        config = bundled_config(name)
        assert config["model_type"] in profile.model_types
        assert config.get("text_config", config)["vocab_size"] >= (profile.vocabulary_size or 0)


def test_every_bundled_model_is_listed_with_where_it_comes_from() -> None:
    described = (MODELS_FOLDER / "README.md").read_text()
    assert [name for name in bundled_names() if f"`{name}.json`" not in described] == []


def test_kimi_k25_is_the_latent_attention_and_int4_experts_of_the_reference_deployment() -> None:
    text = bundled_config("kimi_k25")["text_config"]
    assert (text["kv_lora_rank"], text["qk_rope_head_dim"], text["num_attention_heads"]) == (512, 64, 64)
    assert (text["n_routed_experts"], text["num_experts_per_tok"], text["moe_intermediate_size"]) == (384, 8, 2048)
    weights = text["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", "no bundled config.json: profile smollm2 names none; give the checkpoint's folder"),
        ("kimi_k3", "there is none for 'kimi_k3'; .*kimi_k25"),
        ("../profiles/kimi_k25", "there is none for '../profiles/kimi_k25'"),
    ],
)
def test_a_model_that_does_not_ship_is_refused_with_those_that_do(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        bundled_config(name)
