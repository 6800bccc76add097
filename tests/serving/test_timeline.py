"""The timeline: the reference deployment's table row by row, and nothing guessed."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.serving.timeline import Measured, Range, Timeline, as_document, plan_timeline
from aerie.settings.pipeline import ExpectedRates, ExpectedSettings, PipelineSettings, load_settings
from aerie.settings.presets import preset_path

BEGIN = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
TABLE = {
    "B1_glaive": (10_000, 6.4),
    "B2_opencodeinstruct": (14_714, 9.4),
    "B3_magicoder": (10_000, 6.4),
    "B4_mixturethoughts": (10_002, 6.4),
    "B5_openthoughts": (10_000, 6.4),
    "B6_ultrachat": (15_000, 9.6),
    "B7_sharegpt": (10_000, 6.4),
    "B8_sweagent": (3_572, 6.0),
}


@pytest.fixture(scope="module")
def reference() -> PipelineSettings:
    return load_settings(preset_path("kimi-k25-8x96g"))


def changed(settings: PipelineSettings, key: str, **changes: Any) -> PipelineSettings:
    dataset = settings.datasets[key].model_copy(update=changes)
    return settings.model_copy(update={"datasets": {**settings.datasets, key: dataset}})


def row_of(timeline: Timeline, key: str) -> Any:
    return next(row for row in timeline.datasets if row.dataset == key)


def test_the_reference_deployments_table_comes_out_row_by_row(reference: PipelineSettings) -> None:
    timeline = plan_timeline(reference, starts=BEGIN)
    rows = {row.dataset: row for row in timeline.datasets if not row.imported}
    assert {key: row.prompts for key, row in rows.items()} == {key: prompts for key, (prompts, _) in TABLE.items()}
    for key, (_, hours) in TABLE.items():
        assert rows[key].uncapped == pytest.approx(hours, abs=0.1)
    assert rows["B8_sweagent"].uncapped_sum == "3,572 prompts / 10 a minute"
    assert timeline.uncapped == pytest.approx(57.1, abs=0.1)


def test_capped_is_tokens_over_rate_with_the_sums(reference: PipelineSettings) -> None:
    timeline = plan_timeline(reference, starts=BEGIN)
    assert timeline.capped is not None
    assert (timeline.capped.low, timeline.capped.high) == (pytest.approx(16.5, abs=0.05), pytest.approx(23.9, abs=0.05))
    assert timeline.capped_sum == "80,000,000 tokens / 930-1,350 tokens/s = 16.5-23.9 h"
    one = plan_timeline(reference, starts=BEGIN, rate=Range(1000, 1000))
    assert one.capped == Range(pytest.approx(80_000 / 3600), pytest.approx(80_000 / 3600))


def test_what_is_not_known_is_said_and_leaves_no_end(reference: PipelineSettings) -> None:
    timeline = plan_timeline(reference, starts=BEGIN)
    assert [phase.phase for phase in timeline.phases if phase.hours is None] == ["merge", "training", "benchmark"]
    assert timeline.ends is None
    assert timeline.generation_ends is not None
    assert "the rates of merge, training, benchmark" in timeline.unknown[0]
    assert any("A1, A2" in note for note in timeline.notes)


def test_with_every_rate_there_is_an_end_date(reference: PipelineSettings) -> None:
    rates = reference.expected_rates.model_copy(
        update={"merge_tokens_per_second": 1e6, "training_tokens_per_second": 24_000.0, "benchmark_hours": 2.0}
    )
    timeline = plan_timeline(reference.model_copy(update={"expected_rates": rates}), starts=BEGIN)
    hours = [phase.hours.low for phase in timeline.phases if phase.hours]
    assert hours == [
        pytest.approx(80e6 / 1e6 / 3600),
        pytest.approx(80e6 / 1345 / 3600),
        pytest.approx(3 * 80e6 / 24_000 / 3600),
        2.0,
    ]
    assert timeline.ends is not None and timeline.capped is not None
    assert timeline.ends[1] == BEGIN + timedelta(hours=timeline.capped.high + sum(hours))


def test_a_budget_that_the_prompts_cannot_fill_takes_only_what_they_give(reference: PipelineSettings) -> None:
    few = changed(reference, "B1_glaive", expected=ExpectedSettings(prompts=1000, mean_response_tokens=1577))
    row = row_of(plan_timeline(few, starts=BEGIN), "B1_glaive")
    assert row.tokens == 1_577_000
    assert row.capped_sum.startswith("1,000 prompts x 1,577 tokens / ")


def test_without_a_rate_completions_a_minute_and_lengths_tell(reference: PipelineSettings) -> None:
    rates = ExpectedRates(completions_per_minute=26)
    timeline = plan_timeline(reference.model_copy(update={"expected_rates": rates}), starts=BEGIN)
    first = row_of(timeline, "B1_glaive").capped
    assert first.low == pytest.approx(10e6 / 1577 / 26 / 60)  # 6,341 responses
    assert row_of(timeline, "B3_magicoder").capped is None
    assert timeline.capped is None
    assert "the rate (--rate, or expected_rates of the configuration) of B3_magicoder" in timeline.unknown[0]


def test_lengths_of_prompts_are_part_of_later_phases(reference: PipelineSettings) -> None:
    known = changed(
        reference,
        "B1_glaive",
        expected=ExpectedSettings(prompts=10_000, mean_prompt_tokens=1577, mean_response_tokens=1577),
    )
    assert row_of(plan_timeline(known, starts=BEGIN), "B1_glaive").corpus_tokens == 20_000_000


def test_what_was_measured_is_believed_before_what_was_expected(reference: PipelineSettings) -> None:
    seen = {
        "B1_glaive": Measured(mean_response_tokens=100, prompts=5000, kept_tokens=100_000, tokens_per_second=1000),
        "B2_opencodeinstruct": Measured(finished=True),
    }
    timeline = plan_timeline(reference, starts=BEGIN, measured=seen)
    first = row_of(timeline, "B1_glaive")
    assert first.tokens == 400_000
    assert first.capped == Range(pytest.approx(400 / 3600), pytest.approx(400 / 3600))
    assert row_of(timeline, "B2_opencodeinstruct").capped == Range(0, 0)


@given(
    prompts=st.none() | st.integers(1, 10**7),
    response=st.none() | st.floats(1, 1e6),
    budget=st.sampled_from([0, 1000, 10**7]),
    low=st.none() | st.floats(0.1, 1e5),
    per_minute=st.none() | st.floats(0.1, 1e4),
)
def test_hours_are_known_exactly_where_they_can_be(
    reference: PipelineSettings, prompts: int | None, response: float | None, budget: int, low: float | None,
    per_minute: float | None,
) -> None:  # fmt: skip
    rates = ExpectedRates(
        tokens_per_second_low=low, tokens_per_second_high=low and low * 2, completions_per_minute=per_minute
    )
    expected = ExpectedSettings(prompts=prompts, mean_response_tokens=response)
    settings = changed(reference, "B1_glaive", budget_tokens=budget, expected=expected)
    timeline = plan_timeline(settings.model_copy(update={"expected_rates": rates}), starts=BEGIN)
    row = row_of(timeline, "B1_glaive")
    assert (row.uncapped is not None) == bool(prompts and per_minute)
    tokens_known = bool(budget or (prompts and response))
    assert (row.capped is not None) == (tokens_known and bool(low or (per_minute and response)))
    if row.capped is not None:
        assert 0 <= row.capped.low <= row.capped.high
        assert row.capped_sum
    assert as_document(timeline)["datasets"][0]["dataset"] == "B1_glaive"
