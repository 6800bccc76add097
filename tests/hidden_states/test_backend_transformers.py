"""The back end ``transformers``: any architecture, batched without changing a value, resumed, never half written."""

import numpy as np
import pytest
import torch

from aerie.artefacts.corpus import DATASET_FOLDER, iterate_rows
from aerie.artefacts.state_files import read_states, write_states
from aerie.errors import BadInput, Failed
from aerie.hidden_states.backend_transformers import SHARED_PASS_TOKENS, equal_length_batches
from aerie.hidden_states.decoder import load_decoder, streams_of
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify

from .conftest import VOCABULARY_SIZE, Edition


def rows_of_few_lengths(count=24):
    random = np.random.default_rng(0)
    lengths = [3, SHARED_PASS_TOKENS, 40, 40, 77]
    return [random.integers(2, VOCABULARY_SIZE, lengths[number % 5]).tolist() for number in range(count)]


def captured(edition: Edition, **hidden_states):
    asked = {"backend": "transformers", "parity_rows": 3, **hidden_states}
    forecast(edition.request(hidden_states=asked), edition.events)
    return capture(edition.request(hidden_states=asked), edition.events).manifest


def states_by_name(edition):
    return {path.name: read_states(path).hidden_states for path in sorted(edition.states.glob("*.safetensors"))}


@pytest.fixture(params=["verifier", "latent_attention_verifier"])
def either(request, tmp_path):
    return Edition(tmp_path, request.getfixturevalue(request.param))


def test_states_of_batches_are_bit_for_bit_those_of_one_row_at_a_time(either):
    either.merged(rows_of_few_lengths())
    manifest = captured(either, concurrency=8)
    assert manifest.counts["files"] == 24
    assert manifest.counts["parity"]["maximum_relative"] < 1e-5
    together = states_by_name(either)
    for path in either.states.glob("*.safetensors"):
        path.unlink()
    captured(either, concurrency=1)
    alone = states_by_name(either)
    assert together.keys() == alone.keys()
    assert [name for name in alone if not torch.equal(together[name], alone[name])] == []
    experts = "deepseek" in either.verifier.joinpath("config.json").read_text()
    assert any("a pass of its own" in message for message in either.progress()) == experts
    assert (
        verify(either.files, resolve_layers(either.request().settings), either.events, progress_seconds=60).rows == 24
    )


def test_what_an_interrupted_run_left_is_kept_and_what_is_wrong_is_named_and_captured_again(edition):
    edition.merged(rows_of_few_lengths())
    captured(edition)
    files = sorted(edition.states.glob("*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in files}
    files[3].unlink()
    files[5].write_bytes(files[5].read_bytes()[:-4])
    assert captured(edition).counts["captured_tokens"] == sum(
        len(read_states(path).token_ids) for path in (files[3], files[5])
    )
    assert [path for path in files if path.stat().st_mtime_ns != before[path]] == [files[3], files[5]]
    assert any(message.startswith(f"captured again: {files[5].name}: cannot be read") for message in edition.progress())


def scaled(path):
    state = read_states(path)
    write_states(path, token_ids=state.token_ids, hidden_states=state.hidden_states * 100)


def test_files_that_verification_finds_wrong_are_captured_again_without_force_and_only_they(edition):
    edition.merged(rows_of_few_lengths())
    captured(edition, parity_rows=0)
    files = sorted(edition.states.glob("*.safetensors"))
    layers = resolve_layers(edition.request().settings)
    good = {path: path.read_bytes() for path in files}
    files[2].write_bytes(good[files[2]][:-64] + b"\xff" * 64)  # of the same size: not a number
    scaled(files[4])
    with pytest.raises(Failed, match=r"2 state files are wrong: .*far from the medians.*; 2 of them are removed"):
        verify(edition.files, layers, edition.events, progress_seconds=60)
    manifest = captured(edition, parity_rows=0)
    assert manifest.counts["captured_tokens"] == sum(len(read_states(files[one]).token_ids) for one in (2, 4))
    assert verify(edition.files, layers, edition.events, progress_seconds=60).rows == 24
    assert {path: path.read_bytes() for path in files} == good


def test_magnitudes_far_from_the_others_are_named_and_captured_again_by_capture_itself(edition):
    edition.merged(rows_of_few_lengths())
    captured(edition, parity_rows=0)
    files = sorted(edition.states.glob("*.safetensors"))
    good = files[4].read_bytes()
    scaled(files[4])
    files[7].unlink()  # something to do
    captured(edition, parity_rows=0)
    assert files[4].read_bytes() == good
    assert any(message.startswith(f"captured again: {files[4].name}: magnitudes") for message in edition.progress())


def test_links_of_an_earlier_shuffle_are_made_anew_without_capturing(edition):
    edition.merged(rows_of_few_lengths())
    captured(edition, parity_rows=0)
    first, second = (edition.files.hidden_states / f"hs_{row}.safetensors" for row in (0, 1))
    target = first.readlink()
    first.unlink()
    first.symlink_to(second.readlink())
    assert captured(edition, parity_rows=0).counts["captured_tokens"] == 0
    assert first.readlink() == target


def test_parity_that_is_asked_for_later_is_all_that_a_finished_capture_does_and_wrong_states_then_fail(edition):
    edition.merged(rows_of_few_lengths(6))
    before = captured(edition, parity_rows=0)
    assert before.counts["parity"] is None
    edition.events_path.write_text("")
    after = captured(edition)
    assert after.counts["parity"]["rows"] == 3
    assert {**after.counts, "parity": None} == before.counts
    assert (after.fingerprint, after.outputs) == (before.fingerprint, before.outputs), "training would start anew"
    assert not any("rows (" in message for message in edition.progress()), "state files were read for nothing"
    assert captured(edition, parity_rows=100).counts["parity"]["rows"] == 6
    asked = edition.request(hidden_states={"backend": "transformers", "parity_rows": 100})
    assert capture(asked, edition.events).reused
    for path in edition.states.glob("*.safetensors"):
        state = read_states(path)
        write_states(path, token_ids=state.token_ids, hidden_states=state.hidden_states * 1.5)
    edition.files.manifest("capture").unlink()
    captured(edition, parity_rows=0)
    with pytest.raises(Failed, match="differ from transformers"):
        captured(edition)
    assert not edition.files.manifest("capture").exists(), "training would start on states that were just refused"


def test_a_forced_capture_makes_anew_what_no_check_of_files_finds_wrong_and_its_retry_keeps_what_it_made(edition):
    edition.merged(rows_of_few_lengths(6))
    captured(edition)
    files = sorted(edition.states.glob("*.safetensors"))
    good = {path: path.read_bytes() for path in files}
    for path in files:
        state = read_states(path)
        write_states(path, token_ids=state.token_ids, hidden_states=state.hidden_states * 1.5)
    edition.files.manifest("capture").unlink()
    with pytest.raises(Failed, match=r"differ from transformers .* capture with --force"):
        captured(edition)
    asked = {"backend": "transformers", "parity_rows": 3}
    request = edition.request(hidden_states=asked, force=True)
    assert capture(request, edition.events).manifest.counts["captured_tokens"] > 0
    assert {path: path.read_bytes() for path in files} == good
    files[3].unlink()
    retry = capture(request, edition.events).manifest.counts
    assert retry["captured_tokens"] == len(read_states(files[3]).token_ids), "the retry threw away finished work"
    anew = request.model_copy(update={"run_id": "another"})
    assert capture(anew, edition.events).manifest.counts["captured_tokens"] == retry["tokens"]
    other_layers = edition.request(hidden_states={**asked, "layers": [1, 2, 3]}).settings
    changed = anew.model_copy(update={"settings": other_layers})
    forecast(changed, edition.events)
    assert capture(changed, edition.events).manifest.counts["captured_tokens"] == retry["tokens"]
    assert capture(changed, edition.events).manifest.counts["captured_tokens"] == 0


def test_states_of_another_back_end_are_refused_and_discarded_only_when_forced(edition):
    edition.merged(rows_of_few_lengths(4))
    captured(edition)
    request = edition.request(hidden_states={"backend": "sglang"})
    with pytest.raises(Failed, match="backend transformers -> None"):
        capture(request, edition.events)


def test_batches_hold_rows_of_one_length_within_the_limit(edition):
    edition.merged([[2] * length for length in (20, 5, 20, 5, 20, 9, 20)])
    rows = list(iterate_rows(edition.files.corpus / DATASET_FOLDER))
    batches = [[len(row.input_ids) for row in batch] for batch in equal_length_batches(rows, limit=3)]
    assert batches == [[20, 20, 20], [20], [9], [5], [5]]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3_moe", "gemma2"])
def test_the_streams_of_other_architectures_are_what_transformers_calls_hidden_states(family, tmp_path, edition):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    small = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    names = {"gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 64, "n_positions": 64}}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if family == "qwen3_moe" else {}
    config = AutoConfig.for_model(family, **names.get(family, {**small, **experts}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    edition.verifier = tmp_path / "model"
    decoder = load_decoder(edition.request().settings, dtype=torch.float32, device="cpu")
    ids = torch.randint(0, 64, (2, 9))
    with torch.inference_mode(), streams_of(decoder, range(5)) as streams:
        theirs = decoder(ids, use_cache=False, output_hidden_states=True).hidden_states
        norm = next(getattr(decoder, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(decoder, name))
        torch.testing.assert_close(norm(streams[4]), theirs[4])
    for layer in range(4):
        torch.testing.assert_close(streams[layer], theirs[layer])


def test_a_decoder_whose_layers_cannot_be_told_is_refused():
    decoder = torch.nn.Module()
    decoder.config = type("Config", (), {"num_hidden_layers": 4})
    with pytest.raises(BadInput, match="found 0 lists of 4 layers"), streams_of(decoder, [1]):
        pass
