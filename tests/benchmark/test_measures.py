import pytest

from aerie.benchmark.measures import (
    DatasetRun,
    Measured,
    acceptance_by_position,
    acceptance_length,
    acceptance_rate,
    first_difference,
    of_prompts,
    summarise,
    verification_of,
)
from aerie.errors import Failed
from tests.benchmark.stand_in import meta


def request(tokens, steps=None, *, sample_id="a", output_ids=None):
    verification = None
    if steps is not None:
        histogram = [steps, tokens - steps, 0, 0]
        verification = {
            "spec_verify_ct": steps,
            "spec_num_correct_drafts": tokens - steps,
            "spec_num_proposed_drafts": 3 * steps,
            "spec_correct_drafts_histogram": histogram,
        }
    return Measured(
        dataset="B1_glaive",
        sample_id=sample_id,
        prompt_tokens=3,
        output_ids=tuple(output_ids or range(tokens)),
        completion_tokens=tokens,
        finish_reason="stop",
        verification=verification,
    )


def test_acceptance_length_is_pooled_and_not_a_mean_of_requests():
    requests = [request(100, 25), request(10, 10)]
    assert acceptance_length(requests) == pytest.approx(110 / 35)  # the mean of requests would be 2.5
    assert acceptance_length([request(100)]) is None


def test_acceptance_rate_is_accepted_over_proposed():
    assert acceptance_rate([request(100, 50), request(40, 10)]) == pytest.approx((50 + 30) / (150 + 30))


def test_acceptance_by_position_counts_steps_that_accepted_at_least_so_many():
    one = request(10, 10)
    histogram = one.verification.model_copy(update={"histogram": (2, 3, 4, 1)})
    assert acceptance_by_position([one.model_copy(update={"verification": histogram})]) == [0.8, 0.5, 0.1]


@pytest.mark.parametrize(
    "field",
    ["spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"],
)
def test_a_missing_field_fails_naming_it_and_is_never_a_zero(field):
    told = meta(20, 2.0)
    del told[field]
    with pytest.raises(Failed, match=rf"sample s1: meta_info\.{field}: field required") as failure:
        verification_of(told, completion_tokens=20, sample_id="s1")
    assert "It said completion_tokens" in str(failure.value)


def test_an_answer_of_one_token_was_never_verified_and_counts_for_nothing():
    assert verification_of(meta(1, None), completion_tokens=1, sample_id="s1") is None
    assert acceptance_length([request(100, 25), request(1)]) == 4.0


@pytest.mark.parametrize(
    ("left", "right", "position"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1)]
)
def test_the_first_difference_is_found_also_where_one_output_is_longer(left, right, position):
    assert first_difference(left, right) == position


def runs(**requests):
    return {key: DatasetRun(seconds=2.0, requests=tuple(listed)) for key, listed in requests.items()}


def test_the_summary_has_every_data_set_and_says_where_outputs_part():
    figures = summarise(
        runs(B1=[request(40, sample_id="a")], B2=[request(20, sample_id="b", output_ids=[1, 2, 3])]),
        runs(B1=[request(40, 40, sample_id="a")]),
        runs(B1=[request(40, 10, sample_id="a")], B2=[request(20, 20, sample_id="b", output_ids=[1, 9, 3])]),
    )
    assert figures["acceptance_length"] == 2.0
    assert figures["acceptance_length_untrained"] == 1.0
    assert {key: row["acceptance_length"] for key, row in figures["per_dataset"].items()} == {"B1": 4.0, "B2": 1.0}
    assert (figures["tokens_per_second"], figures["tokens_per_second_without"]) == (15.0, 15.0)
    assert figures["lossless"] is False
    assert figures["divergences"] == [
        {"dataset": "B2", "sample_id": "b", "position": 1, "own_token": 2, "other_token": 9}
    ]
    assert [row["lossless"] for row in figures["per_dataset"].values()] == [True, False]


def test_runs_of_different_prompts_are_not_compared():
    with pytest.raises(Failed, match="different prompts"):
        summarise(runs(B1=[request(4, sample_id="a")]), None, runs(B1=[request(4, 2, sample_id="b")]))


def test_a_run_of_fewer_prompts_is_compared_with_the_same_prompts_of_the_longer_one():
    own = runs(B1=[request(4, sample_id="a"), request(4, sample_id="b")], B2=[request(4, sample_id="c")])
    fewer = of_prompts(own, runs(B1=[request(4, 2, sample_id="b")]))
    assert {key: [one.sample_id for one in run.requests] for key, run in fewer.items()} == {"B1": ["b"]}
