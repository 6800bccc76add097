"""The forecast: right to the byte, and a refusal that shows its sum."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from aerie.artefacts.manifest import write_manifest
from aerie.errors import BadInput, Failed
from aerie.hidden_states.forecast import CaptureRate, forecast_disk, require_fit
from aerie.hidden_states.identity import bind_states, capture_identity
from aerie.hidden_states.launch import capture_hooks
from aerie.hidden_states.layers import CapturedLayers, planned_layers, resolve_layers
from aerie.hidden_states.stage import capture, forecast
from aerie.settings.profile import Profile

from .conftest import END

KIMI_K25 = CapturedLayers(auxiliary=(2, 30, 58), decoder_layers=61, hidden_size=7168, dtype="bfloat16")


@pytest.fixture
def corpus(edition):
    edition.merged([[1, 2, 3], [4, 5, 6, 7, 8]])
    return edition


def free(monkeypatch, free_bytes, total=1_000_000):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=total, used=0, free=free_bytes))


def test_kimi_k25_takes_57344_bytes_a_token_and_the_first_run_1_21_terabytes():
    assert KIMI_K25.bytes_per_token == 57_344
    assert KIMI_K25.bytes_per_token * 21_033_536 == pytest.approx(1.21e12, rel=0.01)


def test_the_first_run_of_kimi_k25_is_forecast_with_bytes_hours_and_place(tmp_path):
    predicted = forecast_disk(
        tokens=21_033_536,
        layers=KIMI_K25,
        folder=tmp_path / "hidden_states",
        present_bytes=0,
        free_share=0.0,
        rate=CaptureRate(300.0, "expected_rates.capture_tokens_per_second"),
    )
    assert predicted.total_bytes == 21_033_536 * 57_344 == 1_206_147_088_384
    assert predicted.sum.startswith("21,033,536 tokens x 57,344 bytes = 1,206.15 GB, of which 0.00 GB are there; ")
    assert f"{tmp_path}/hidden_states has" in predicted.sum
    told = "21,033,536 tokens / 300 tokens/s = 19.5 h (expected_rates.capture_tokens_per_second)"
    assert predicted.sum.endswith(told)
    with pytest.raises(Failed, match=r"do not fit: 21,033,536 tokens x .* = 19.5 h"):
        require_fit(replace(predicted, free_bytes=10**9))


def test_the_time_is_told_by_the_latest_capture_before_what_is_expected_and_else_not_known(corpus):
    assert (
        "time not known: no capture of this edition was measured"
        in forecast(corpus.request(), corpus.events).data["sum"]
    )
    expected = {"expected_rates": {"capture_tokens_per_second": 4}}
    counts = forecast(corpus.request(**expected), corpus.events).manifest.counts
    assert (counts["missing_tokens"], counts["hours"]) == (8, pytest.approx(8 / 4 / 3600))
    measured = {"backend": "sglang", "tokens_per_second": 16.0}
    write_manifest(
        corpus.files.manifest("capture"), stage="capture", edition="main", dataset=None, fingerprint="f", inputs=[],
        outputs=[], counts=measured,
    )  # fmt: skip
    counts = forecast(corpus.request(**expected), corpus.events).manifest.counts
    assert (counts["hours"], counts["rate_source"]) == (
        pytest.approx(8 / 16 / 3600),
        "measured by this edition's latest capture",
    )
    other = {"hidden_states": {"backend": "transformers"}}
    assert forecast(corpus.request(**expected, **other), corpus.events).manifest.counts["tokens_per_second"] == 4


def test_forecast_counts_prompt_tokens_too_and_names_the_layers(corpus):
    counts = forecast(corpus.request(), corpus.events).manifest.counts
    assert counts["bytes"] == 8 * 4 * 64 * 4
    assert counts["layers"] == [2, 4, 5]


def test_states_that_do_not_fit_beside_the_share_to_be_spared_are_refused_with_the_sum(corpus, monkeypatch):
    needed = 8 * 4 * 64 * 4
    free(monkeypatch, needed + 100_000)
    forecast(corpus.request(hidden_states={"free_share": 0.1}), corpus.events)
    free(monkeypatch, needed + 99_999)
    with pytest.raises(Failed, match=r"8 tokens x 1,024 bytes = 0.00 GB, .* of them to be spared"):
        forecast(corpus.request(hidden_states={"free_share": 0.1}), corpus.events)


def test_states_that_are_there_already_need_no_room_but_those_of_other_samples_do_not_help(corpus, monkeypatch):
    corpus.states.mkdir(parents=True)
    (corpus.states / "B1%2F0.safetensors").write_bytes(b"x" * 8000)
    (corpus.states / "gone.safetensors").write_bytes(b"x" * 8000)
    free(monkeypatch, 5 * 1024)
    counts = forecast(corpus.request(), corpus.events).manifest.counts
    assert (counts["present_bytes"], counts["missing_tokens"]) == (3 * 1024, 5)
    free(monkeypatch, 5 * 1024 - 1)
    with pytest.raises(Failed, match="do not fit"):
        forecast(corpus.request(), corpus.events)


def test_plain_states_of_a_generating_server_are_not_counted_twice_where_fp8_files_are_asked_for(corpus):
    corpus.states.mkdir(parents=True)
    (corpus.states / "B1%2F1.safetensors").write_bytes(b"x" * 5 * 4 * 64 * 2)  # bfloat16
    asked = {"dtype": "bfloat16", "storage": "fp8", "capture": "generate"}
    counts = forecast(corpus.request(hidden_states=asked), corpus.events).manifest.counts
    assert (counts["missing_tokens"], counts["tokens"]) == (3, 8)


def test_what_a_forced_capture_discards_is_forecast_as_missing_and_its_room_as_free(corpus, monkeypatch):
    corpus.states.mkdir(parents=True)
    (corpus.states / "B1%2F0.safetensors").write_bytes(b"x" * 8000)
    free(monkeypatch, 8 * 1024 - 8000)
    manifest = forecast(corpus.request(force=True), corpus.events).manifest
    assert (manifest.counts["present_bytes"], manifest.counts["discarded_bytes"]) == (0, 8000)
    assert "0.00 GB are there once --force has discarded 0.00 GB" in corpus.progress()[-1]
    free(monkeypatch, 8 * 1024 - 8001)
    with pytest.raises(Failed, match="do not fit"):
        forecast(corpus.request(force=True), corpus.events)


def test_layers_come_from_the_settings_before_speculators_default(edition):
    assert resolve_layers(edition.request().settings).auxiliary == (2, 4, 5)
    assert resolve_layers(edition.request(hidden_states={"layers": [1, 3, 6]}).settings).auxiliary == (1, 3, 6)


@pytest.mark.parametrize(
    ("layers", "problem"),
    [([0, 2, 4], "from 1 to 7"), ([2, 4, 8], "from 1 to 7"), ([2, 4, 9], "within"), ([2, 2, 4], "distinct")],
)
def test_layers_that_no_hook_can_capture_are_refused(edition, layers, problem):
    with pytest.raises(BadInput, match=problem):
        resolve_layers(edition.request(hidden_states={"layers": layers}).settings)
    with pytest.raises(BadInput, match=r"from 1 to 7|distinct"):
        planned_layers(edition.request(hidden_states={"layers": layers}).settings)


@pytest.mark.parametrize("profile_layers", [None, (1, 3, 6)])
@pytest.mark.parametrize("asked", [None, [1, 2, 5]])
def test_a_server_planned_without_speculators_captures_the_layers_that_speculators_names(
    edition, latent_attention_verifier, monkeypatch, asked, profile_layers
):
    for verifier in (edition.verifier, latent_attention_verifier):
        edition.verifier = verifier
        settings = edition.request(hidden_states={"layers": asked}).settings
        profile: Profile = settings.verifier.load_profile().model_copy(update={"capture_layers": profile_layers})
        monkeypatch.setattr(type(settings.verifier), "load_profile", lambda self, profile=profile: profile)
        assert planned_layers(settings) == resolve_layers(settings)


def test_the_server_is_launched_with_the_layers_of_the_forecast(corpus):
    with pytest.raises(BadInput, match="forecast"):
        capture_hooks(corpus.request())
    forecast(corpus.request(), corpus.events)
    modules = [hook["target_modules"] for hook in capture_hooks(corpus.request())]
    assert modules == [
        ["model.layers.0"],
        ["model.layers.2.input_layernorm"],
        ["model.layers.4.input_layernorm"],
        ["model.layers.5.input_layernorm"],
        ["model.norm"],
    ]
    with pytest.raises(BadInput, match=r"made for layers \[2, 4, 5\], but the settings now ask for \[1, 2, 3\]"):
        capture(corpus.request(hidden_states={"layers": [1, 2, 3]}), corpus.events)


def test_a_corpus_with_rows_that_break_the_boundary_is_refused_before_its_capture_is_paid_for(edition):
    edition.merged([[4, 5, 6], [4, END, 6, 7], [4, 5, END]])
    with pytest.raises(
        Failed, match=r"tokens_after_end 1; first row 1 \(data set B1_glaive, .*, then merge with --force"
    ):
        forecast(edition.request(), edition.events)
    with pytest.raises(BadInput, match="forecast"):
        capture(edition.request(), edition.events)
    edition.merged([[4, 5, 6], [4, 5, END]])
    assert forecast(edition.request(), edition.events).manifest.counts["boundaries"]["rows"] == 2


def test_a_corpus_that_was_merged_behind_its_forecast_is_not_captured(corpus):
    forecast(corpus.request(), corpus.events)
    corpus.merged([[4, END, 6, 7]])
    with pytest.raises(BadInput, match=r"forecast was made for corpus \w+, but the corpus is .*; run forecast again"):
        capture(corpus.request(), corpus.events)


def test_a_row_that_fills_the_servers_context_is_refused_before_the_server_is_asked(corpus):
    forecast(corpus.request(), corpus.events)
    with pytest.raises(BadInput, match=r"longest corpus row has 5 tokens, but serving.context_length is 5"):
        capture(corpus.request(serving={"context_length": 5}), corpus.events)


def test_states_of_another_verifier_are_refused_with_the_difference_and_discarded_only_when_forced(corpus):
    identity = capture_identity(corpus.request(), resolve_layers(corpus.request().settings))
    bind_states(corpus.files, identity, discard=False)
    state = corpus.states / "a.safetensors"
    state.write_bytes(b"x")
    bind_states(corpus.files, identity, discard=False)
    assert state.exists()
    with pytest.raises(Failed, match=r"verifier .* -> retrained"):
        bind_states(corpus.files, {**identity, "verifier": "retrained"}, discard=False)
    assert state.exists()
    bind_states(corpus.files, {**identity, "verifier": "retrained"}, discard=True)
    assert not state.exists()


def test_retraining_the_verifier_in_place_changes_the_identity_of_its_states(corpus, tmp_path):
    before = capture_identity(corpus.request(), resolve_layers(corpus.request().settings))
    copy = tmp_path / "copy"
    shutil.copytree(corpus.verifier, copy)
    corpus.verifier = copy
    assert capture_identity(corpus.request(), resolve_layers(corpus.request().settings)) == before
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert capture_identity(corpus.request(), resolve_layers(corpus.request().settings)) != before


@pytest.mark.parametrize(
    "serving",
    [
        {"extra_arguments": ["--quantization=fp8"]},
        {"kv_cache_dtype": "fp8_e4m3", "allow_quantised_kv": "to see"},
    ],
    ids=["quantised", "KV cache"],
)
def test_states_of_a_server_that_computes_others_are_not_taken_for_these(corpus, serving):
    layers = resolve_layers(corpus.request().settings)
    before = capture_identity(corpus.request(), layers)
    serving = {"device": "cpu", "context_length": 512, **serving}
    assert capture_identity(corpus.request(serving=serving), layers) != before
    full = corpus.request(serving={"device": "cpu", "context_length": 512, "kv_cache_dtype": "bf16"})
    assert capture_identity(full, layers) == before, "states of a configuration that names full precision are refused"
    from_transformers = corpus.request(serving=serving, hidden_states={"backend": "transformers"})
    assert capture_identity(from_transformers, layers) == {**before, "backend": "transformers"}


GIB = 1 << 30
ROW_OF_120 = list(range(2, 122))


def limited(limit_bytes, **settings):
    return {"disk_limit_gib": limit_bytes / GIB, **settings}


def test_a_corpus_whose_states_exceed_the_disk_limit_is_streamed_and_one_that_fits_is_kept(edition, monkeypatch):
    edition.merged([ROW_OF_120] * 200)
    whole = 200 * 120 * 1024
    free(monkeypatch, whole // 4)
    with pytest.raises(Failed, match="do not fit"):
        forecast(edition.request(), edition.events)
    counts = forecast(edition.request(hidden_states=limited(whole // 10)), edition.events).manifest.counts
    assert counts["window_bytes"] == whole // 10
    assert counts["captured_tokens"] == 200 * 120  # one epoch
    assert "streamed while training" in edition.progress()[-1]
    free(monkeypatch, 2 * whole)
    kept = forecast(edition.request(hidden_states=limited(2 * whole)), edition.events).manifest.counts
    assert kept["window_bytes"] is None


def test_each_epoch_of_a_streamed_corpus_is_captured_again_and_the_forecast_says_so(edition):
    edition.merged([ROW_OF_120] * 200)
    request = edition.request(hidden_states=limited(2_000_000), training={"epochs": 3, "sequence_length": 64})
    assert forecast(request, edition.events).manifest.counts["captured_tokens"] == 3 * 200 * 120
    assert "in each of 3 epochs = 72,000 tokens" in edition.progress()[-1]


def test_a_limit_that_cannot_hold_two_steps_is_refused_with_the_sum_before_anything_waits_for_it(edition):
    edition.merged([ROW_OF_120] * 200)
    with pytest.raises(BadInput, match=r"2 x 1 .* x \(64 .* x 1,032 .* \+ 8,192\) = 148,480; set it to 0.0002"):
        forecast(edition.request(hidden_states=limited(148_479)), edition.events)


def test_a_window_larger_than_what_is_free_is_refused(edition, monkeypatch):
    edition.merged([ROW_OF_120] * 200)
    free(monkeypatch, 1_999_999)
    with pytest.raises(Failed, match="do not fit"):
        forecast(edition.request(hidden_states=limited(2_000_000)), edition.events)
