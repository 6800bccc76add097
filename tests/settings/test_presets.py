"""Every preset loads, and the reference deployment's holds the reference deployment's figures."""

import re

import pytest

from aerie.errors import BadInput
from aerie.serving.memory import HostMemory
from aerie.settings.bundled import bundled_config
from aerie.settings.machine import PROJECT_ROOT, settings_path
from aerie.settings.pipeline import DATASET_KEYS, GENERATED_KEYS, CanarySettings, PipelineSettings, load_settings
from aerie.settings.presets import preset_names, preset_of, preset_path
from aerie.sources.readers import READERS, TOKENISED

KIMI = "kimi-k25-8x96g"
COMMIT = re.compile(r"[0-9a-f]{40}")


@pytest.fixture(autouse=True)
def no_folders_of_our_own(monkeypatch):
    monkeypatch.delenv("AERIE_MODELS", raising=False)
    monkeypatch.setenv("AERIE_HOME", "/srv/aerie")


def load(name: str) -> PipelineSettings:
    return load_settings(preset_path(name))


def test_the_presets_are_the_missions_the_demo_and_a_single_gpu():
    assert preset_names() == ["demo", KIMI, "qwen3-8b-1x80g"]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_and_is_named_after_its_file(name):
    settings = load(name)
    assert settings.name == name
    assert preset_of(preset_path(name)) == name
    assert all(dataset.source.reader in (*READERS, TOKENISED) for dataset in settings.datasets.values())


@pytest.mark.parametrize("name", preset_names())
def test_what_a_preset_takes_from_the_hub_is_pinned_to_a_commit(name):
    settings = load(name)
    places = [settings.verifier, *(dataset.source for dataset in settings.datasets.values())]
    pinned = [place for place in places if place.huggingface is not None]
    assert [place for place in pinned if COMMIT.fullmatch(place.revision or "") is None] == []


def test_the_demo_is_one_file_and_the_default(monkeypatch):
    monkeypatch.delenv("AERIE_CONFIG", raising=False)
    assert preset_path("demo") == PROJECT_ROOT / "demo" / "config.yaml"
    assert settings_path() == PROJECT_ROOT / "demo" / "config.yaml"
    assert load("demo").verifier.path == PROJECT_ROOT / "demo" / "tiny_verifier"


def test_both_hosts_take_the_same_rows_of_the_same_sources():
    kimi, qwen = load(KIMI), load("qwen3-8b-1x80g")
    assert {key: one.source for key, one in qwen.datasets.items()} == {
        key: kimi.datasets[key].source for key in GENERATED_KEYS
    }


def test_the_missions_server_is_the_reference_deployments():
    serving = load(KIMI).serving
    assert (serving.tensor_parallel_size, serving.mem_fraction_static, serving.kv_cache_dtype) == (8, 0.88, "bf16")
    assert (serving.hicache_size_gb_per_rank, serving.port, serving.allow_quantised_kv) == (48, 8000, None)
    assert serving.observed == {"0.85": 116_171, "0.88": 159_277, "0.93": 231_120, "0.90:fp8_e4m3": 376_029}
    assert serving.extra_arguments == ("--attention-backend", "triton")
    assert serving.start_timeout_seconds > 22 * 60
    memory = HostMemory(available_gb=serving.host_ram_gb or 0, loading_gb=serving.host_loading_gb or 0, ranks=8)
    assert memory.safe_hicache_gb_per_rank == serving.hicache_size_gb_per_rank


def test_the_missions_verifier_has_the_reference_deployments_bytes_per_token():
    verifier = load(KIMI).verifier
    assert verifier.trust_remote_code and verifier.load_profile().trust_remote_code
    text = bundled_config(verifier.profile)["text_config"]
    latent = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    assert latent * text["num_hidden_layers"] * 2 == 70_272, "the experts are INT4, the cache is not"


def test_the_missions_data_sets_are_the_reference_deployments():
    settings = load(KIMI)
    assert tuple(settings.datasets) == DATASET_KEYS
    generated = [settings.datasets[key] for key in GENERATED_KEYS]
    prompts = [one.expected.prompts for one in generated if one.expected]
    assert prompts == [10_000, 14_714, 10_000, 10_002, 10_000, 15_000, 10_000, 3_572]
    assert [one.max_prompts for one in generated] == prompts
    assert sum(prompts) == 83_288
    assert {one.budget_tokens for one in generated} == {10_000_000}
    assert [one.concurrency for one in generated] == [150] * 7 + [32]
    assert settings.datasets["B8_sweagent"].max_new_tokens == 16_384
    assert {one.canary for one in generated} == {CanarySettings()}, "the thresholds that ship changed under the mission"
    assert [key for key, one in settings.datasets.items() if one.about_tools] == ["B1_glaive", "B8_sweagent"]


def test_the_missions_rates_give_the_reference_deployments_hours():
    settings = load(KIMI)
    rates = settings.expected_rates
    hours = 0.0
    for key in GENERATED_KEYS:
        expected = settings.datasets[key].expected
        per_minute = expected.completions_per_minute or rates.completions_per_minute
        hours += expected.prompts / per_minute / 60
    assert hours == pytest.approx(57.1, abs=0.1)
    assert (rates.tokens_per_second_low, rates.tokens_per_second_high) == (930, 1350)
    assert 92e6 / rates.capture_tokens_per_second / 3600 == pytest.approx(19, abs=0.1)


def test_a_presets_folders_follow_the_environment(monkeypatch):
    settings = load(KIMI)
    assert str(settings.verifier.path) == "/srv/aerie/models/Kimi-K2.5"
    assert str(settings.publish.folder) == "/srv/aerie/published"
    monkeypatch.setenv("AERIE_MODELS", "/srv/models")
    assert str(load(KIMI).verifier.path) == "/srv/models/Kimi-K2.5"


def test_rows_fit_from_generation_to_training():
    for name in preset_names():
        settings = load(name)
        assert settings.corpus.maximum_length < settings.serving.context_length
        assert settings.corpus.maximum_length <= settings.training.sequence_length


def test_an_unknown_preset_is_refused_with_those_that_there_are():
    with pytest.raises(BadInput, match="no preset named 'kimi': expected one of demo, kimi-k25-8x96g, qwen3-8b-1x80g"):
        preset_path("kimi")
