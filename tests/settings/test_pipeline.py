from pathlib import Path

import pytest
import yaml

from aerie.errors import BadInput
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import DATASET_KEYS, PilotSettings, load_settings

DEMO = PROJECT_ROOT / "demo" / "config.yaml"


def changed(tmp_path: Path, change) -> Path:
    document = yaml.safe_load(DEMO.read_text())
    change(document)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_the_demo_has_all_ten_data_sets_and_its_paths_are_relative_to_its_file():
    settings = load_settings(DEMO)
    assert tuple(settings.datasets) == DATASET_KEYS
    assert settings.verifier.path == PROJECT_ROOT / "demo" / "tiny_verifier"
    assert all(dataset.source.path.is_file() for dataset in settings.datasets.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["verifier"].pop("profile"), "verifier.profile: Field required"),
        (lambda d: d["serving"].update(mem_fraction=0.5), "serving.mem_fraction: Extra inputs"),
        (lambda d: d["datasets"].update(B6_other=d["datasets"]["B1_glaive"]), "data set B6_other: .*B6_ultrachat"),
        (lambda d: d["datasets"].update(mine=d["datasets"]["B1_glaive"]), "data set mine: .*such as C1_mine"),
        (lambda d: d["datasets"].update(C1_mine=d["datasets"]["A1"]), "C1_mine is tokenised: the A-series"),
        (lambda d: d["datasets"]["B1_glaive"]["source"].update(columns={"id": "n"}), "'columns' is for the reader"),
        (lambda d: d["datasets"]["A1"]["source"].pop("path"), "datasets.A1.source: .*either 'path' or 'huggingface'"),
        (lambda d: d["benchmark"].update(minimum_acceptance_length=1.0), "benchmark.minimum_acceptance_length"),
        (lambda d: d["datasets"]["B1_glaive"].update(budget_tokens=-5), "datasets.B1_glaive.budget_tokens"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(tmp_path, change, message):
    path = changed(tmp_path, change)
    with pytest.raises(BadInput, match=message) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)


def test_data_sets_have_one_order_wherever_they_stand_in_the_file(tmp_path):
    def more(document):
        known = document["datasets"]
        mine = {"source": {"reader": "generic", "path": "mine.jsonl", "licence": "MIT"}}
        document["datasets"] = {"C2_b": mine, "C1_a": mine, **dict(reversed(known.items()))}

    assert tuple(load_settings(changed(tmp_path, more)).datasets) == (*DATASET_KEYS, "C1_a", "C2_b")


def test_a_hub_source_without_a_pinned_revision_is_refused(tmp_path):
    def unpinned(document):
        document["datasets"]["B1_glaive"]["source"].update(path=None, huggingface="glaiveai/glaive-function-calling-v2")

    with pytest.raises(BadInput, match="pinned 'revision'"):
        load_settings(changed(tmp_path, unpinned))


def test_what_is_not_yaml_is_refused_with_its_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: [1")
    with pytest.raises(BadInput, match=r"config\.yaml: not YAML"):
        load_settings(path)


def test_a_runs_budget_holds_for_generated_data_sets_only():
    settings = load_settings(DEMO).with_budget(7)
    assert settings.dataset("B8_sweagent").budget_tokens == 7
    assert settings.dataset("A1") == load_settings(DEMO).dataset("A1")
    assert load_settings(DEMO).with_budget(0).dataset("B1_glaive").cost_ceiling_tokens is None


def test_long_responses_have_the_reference_deployments_defaults_unless_the_file_says_otherwise(tmp_path):
    def bare(document):
        for key in ("B1_glaive", "B8_sweagent"):
            del document["datasets"][key]["concurrency"], document["datasets"][key]["max_new_tokens"]

    settings = load_settings(changed(tmp_path, bare))
    assert (settings.dataset("B1_glaive").concurrency, settings.dataset("B1_glaive").max_new_tokens) == (150, 8192)
    assert (settings.dataset("B8_sweagent").concurrency, settings.dataset("B8_sweagent").max_new_tokens) == (32, 16_384)
    assert load_settings(DEMO).dataset("B8_sweagent").concurrency == 16


def test_a_pilot_takes_its_share_of_each_budget_and_of_the_default_where_there_is_none():
    settings = load_settings(DEMO).model_copy(update={"pilot": PilotSettings(share=0.02)})
    pilot = settings.as_pilot()
    assert pilot.dataset("B1_glaive").budget_tokens == 70
    assert pilot.dataset("B8_sweagent").budget_tokens == 200_000
    assert pilot.dataset("A1") == settings.dataset("A1")
    assert pilot.benchmark.minimum_acceptance_length == 1.2 < settings.benchmark.minimum_acceptance_length
