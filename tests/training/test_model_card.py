"""The card that the hub reads."""

import json

import pytest
from huggingface_hub import ModelCard

from aerie.artefacts.drafter_record import read_record, write_record
from aerie.errors import BadInput
from aerie.training.model_card import model_card
from tests.drafters import MEASURED, record


def test_the_hub_finds_base_model_data_licence_and_results_in_the_card():
    data = ModelCard(model_card(record(benchmark=MEASURED), licence="mit")).data
    assert (data.license, data.base_model, data.datasets) == ("mit", "moonshotai/Kimi-K2.5", ["glaiveai/glaive"])
    assert {"eagle3", "speculative-decoding"} <= set(data.tags)
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == (
        "acceptance_length", 2.75, "glaiveai/glaive",
    )  # fmt: skip


def test_a_card_names_what_made_the_drafter_and_the_exact_flags():
    card = model_card(record(benchmark=MEASURED))
    assert "license:" not in card.partition("\n---\n")[0]
    for part in ("f" * 64, "c" * 64, "a" * 64, "83,411 tokens", "99.12%", "layers 2, 30, 58", "speculators 0.9.0"):
        assert part in card
    assert (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    ) in card
    assert "Lossless: greedy output identical on 8 prompts." in card
    assert "| 1 | 2.81 | 90 | 50 |" in card
    assert "| A1 | files of its own | CC0-1.0 |" in card


def test_a_record_of_before_there_were_two_layouts_is_one_of_sglangs(tmp_path):
    document = record().model_dump(mode="json", exclude={"layouts"})
    (tmp_path / "aerie.json").write_text(json.dumps(document))
    found = read_record(tmp_path)
    assert found.layouts == {"sglang": "."} and "vllm" not in model_card(found)


def test_a_card_before_the_benchmark_claims_nothing():
    card = model_card(record())
    assert "Acceptance length" not in card
    assert ModelCard(card).data.eval_results is None


def test_the_recommended_setting_goes_before_the_one_that_was_measured():
    recommended = {"num_steps": 5, "eagle_topk": 1, "num_draft_tokens": 6}
    assert record(benchmark={**MEASURED, "recommended": recommended}).draft.num_steps == 5
    with pytest.raises(BadInput, match="num_draft_tokens"):
        _ = record(benchmark={**MEASURED, "settings": {"num_steps": 5, "eagle_topk": 1}}).draft


def test_a_drafter_of_which_no_setting_is_recommended_is_not_said_to_be_served_at_the_one_it_was_measured_at():
    made = record(benchmark={**MEASURED, "recommended": None})
    assert made.draft is None
    assert "No draft setting is recommended" in model_card(made)
    assert "--speculative-num-steps" not in model_card(made)


def test_a_damaged_record_is_refused_and_one_that_is_not_there_is_told_apart(tmp_path):
    assert read_record(tmp_path) is None
    path = write_record(tmp_path, record())
    assert read_record(tmp_path) == record()
    path.write_text(path.read_text()[:-20])
    with pytest.raises(BadInput, match=r"aerie\.json: not the record of a drafter"):
        read_record(tmp_path)
