from pathlib import Path

import pytest
import yaml

from aerie.errors import BadInput
from aerie.serving.plan import ServerPlan
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import DATASET_KEYS, PilotSettings, load_settings

DEMO = PROJECT_ROOT / "demo" / "config.yaml"
EXTERNAL = {"backend": "external", "external_url": "http://10.0.0.5:8000"}


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
        (
            lambda d: d["verifier"].update(huggingface="a/b", revision="main"),
            "verifier: .*huggingface is a/b, but revision is 'main': expected a commit",
        ),
        (lambda d: d["verifier"].update(huggingface="b"), "verifier.huggingface: "),
        (
            lambda d: d["publish"].update(folder="${NO_SUCH_VARIABLE}/x"),
            "publish.folder: .*NO_SUCH_VARIABLE.* is not set",
        ),
        (lambda d: d["serving"].update(backend="external"), "serving: .*external.*expected external_url"),
        (
            lambda d: d["serving"].update(external_url="http://h:1"),
            "serving: .*external_url is set, but backend is loc",
        ),
        (lambda d: d["serving"].update(EXTERNAL, port=8000), "serving: .*port is for backend local"),
        (lambda d: d["serving"].update(EXTERNAL, lease_seconds=60), "serving: .*lease_seconds is for backend local"),
        (lambda d: d["serving"].update(EXTERNAL, external_url="h:8000"), "external_url: .*'h:8000'.*expected http"),
        (lambda d: d["serving"].update(EXTERNAL, external_url="http://h:99999"), "external_url: .*is not a URL"),
        (lambda d: d["serving"].update(EXTERNAL, external_url="http://h:1/v1"), "external_url: .*a host and a port"),
        (
            lambda d: d["serving"].update(host_ram_gb=40, host_loading_gb=40),
            "serving: .*host_loading_gb 40 of host_ram",
        ),
        (lambda d: d["serving"].update(host_ram_gb=float("inf")), "serving.host_ram_gb"),
        (lambda d: d["serving"].update(observed={"85": 1000}), "serving: .*observed has '85': .*such as 0.85"),
        (lambda d: d["serving"].update(observed={"0.85": 0}), "serving.observed.0.85"),
        (lambda d: d["serving"].update(stall_seconds=0), "serving.stall_seconds"),
        (lambda d: d["serving"].update(logprob_tolerance_nats=0), "serving.logprob_tolerance_nats"),
        (lambda d: d.update(expected_rates={"tokens_per_second_low": 9}), "expected_rates: .*expected both or neither"),
        (
            lambda d: d.update(expected_rates={"tokens_per_second_low": 9, "tokens_per_second_high": 8}),
            "tokens_per_second_low 9 is above tokens_per_second_high 8",
        ),
        (lambda d: d["datasets"]["B1_glaive"].update(expected={"prompts": 0}), "datasets.B1_glaive.expected.prompts"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(tmp_path, change, message):
    path = changed(tmp_path, change)
    with pytest.raises(BadInput, match=message) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)


def test_a_path_may_name_a_variable_and_is_then_not_beside_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DISK", "/srv/disk")
    path = changed(tmp_path, lambda document: document["publish"].update(folder="${DISK}/drafters"))
    assert load_settings(path).publish.folder == Path("/srv/disk/drafters")


def test_data_sets_have_one_order_wherever_they_stand_in_the_file(tmp_path):
    def more(document):
        known = document["datasets"]
        mine = {"source": {"reader": "generic", "path": "mine.jsonl", "licence": "MIT"}}
        document["datasets"] = {"C2_b": mine, "C1_a": mine, **dict(reversed(known.items()))}

    assert tuple(load_settings(changed(tmp_path, more)).datasets) == (*DATASET_KEYS, "C1_a", "C2_b")


def test_observations_are_read_whether_yaml_takes_their_fraction_for_a_number_or_not(tmp_path):
    observed = {0.85: 116_171, "0.90:fp8_e4m3": 376_029}
    settings = load_settings(changed(tmp_path, lambda document: document["serving"].update(observed=observed)))
    assert settings.serving.observed == {"0.85": 116_171, "0.90:fp8_e4m3": 376_029}


def test_an_external_server_is_described_like_a_local_one_and_its_address_has_one_form(tmp_path):
    external = {**EXTERNAL, "external_url": "http://10.0.0.5:8000/"}
    settings = load_settings(changed(tmp_path, lambda document: document["serving"].update(external)))
    assert settings.serving.external_url == "http://10.0.0.5:8000"
    assert settings.serving.max_total_tokens == load_settings(DEMO).serving.max_total_tokens


def test_how_a_server_is_kept_and_planned_does_not_make_it_another_server(tmp_path):
    kept = {**EXTERNAL, "host_ram_gb": 8, "host_loading_gb": 1, "observed": {"0.1": 9}, "stall_seconds": 9}
    there = load_settings(changed(tmp_path, lambda document: document["serving"].update(kept)))
    moved = there.model_copy(update={"verifier": load_settings(DEMO).verifier})
    fingerprints = {ServerPlan.of_settings(one, "generate").fingerprint() for one in (moved, load_settings(DEMO))}
    assert len(fingerprints) == 1


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


def test_what_is_not_utf8_is_refused_with_its_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"name: caf\xe9")
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
