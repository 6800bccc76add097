"""What a person is asked, from the manifests of a small edition."""

from datetime import UTC, datetime

import pytest

from aerie.approvals import question
from aerie.artefacts.manifest import Manifest
from aerie.errors import BadInput
from aerie.pipeline import RunParameters
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import ApprovalSettings, ExpectedRates, load_settings

SETTINGS = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
RATES = ExpectedRates(capture_tokens_per_second=1000, training_tokens_per_second=2000, benchmark_hours=0.5)
PRICE = ApprovalSettings(cost_per_hour=20, currency="EUR")


def manifest(stage, counts):
    return Manifest(
        schema=1, stage=stage, edition="main", dataset=None, fingerprint="f", inputs=(), outputs=(), counts=counts,
        finished_at=datetime(2026, 12, 1, 12, tzinfo=UTC),
    )  # fmt: skip


FORECAST = manifest(
    "forecast",
    {
        "tokens": 7_200_000, "bytes_per_token": 768, "bytes": 5_529_600_000, "present_bytes": 529_600_000,
        "free_bytes": 77_000_000_000, "spared_bytes": 27_000_000_000, "folder": "/data/editions/main/hidden_states",
    },
)  # fmt: skip
MERGE = manifest("merge", {"rows": 51_100, "datasets": {"B1_glaive": {}, "A1": {}}})
FIGURES = {
    "prompts": 8, "acceptance_length": 2.687, "acceptance_length_untrained": 1.02, "acceptance_rate": 0.561,
    "tokens_per_second": 1395.3, "tokens_per_second_without": 327.4, "speed_up": 1.207, "lossless": True,
}  # fmt: skip
BENCHMARK = manifest(
    "benchmark",
    {
        **FIGURES,
        "drafter_fingerprint": "abcdef0123456789",
        "definition": "acceptance length = completion tokens / verify steps",
        "settings": {**SETTINGS.benchmark.model_dump(mode="json"), "concurrency": 8},
        "by_concurrency": [{"concurrency": 8, **FIGURES}, {"concurrency": 1, **FIGURES, "speed_up": 2.5}],
        "gates": [{"gate": "threshold", "verdict": "passed", "said": "acceptance length 2.687 is at least 2.5"}],
        "estimate": {"acceptance_length": 2.82, "relative_distance": -0.047},
        "recommended": {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16},
        "recommendation": {"rule": "the highest tokens/s"},
        "per_dataset": {"B2_opencodeinstruct": {**FIGURES, "lossless": False}, "B1_glaive": FIGURES},
    },
)
EDITION = {(one.stage, None): one for one in (FORECAST, MERGE, BENCHMARK)}


def rows(body):
    """Rows of a Markdown table by their first cell."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in cells}


def test_capture_is_decided_by_disk_hours_and_cost_with_their_sums():
    settings = SETTINGS.model_copy(update={"expected_rates": RATES, "approvals": PRICE})
    asked = question("capture", settings, RunParameters(), EDITION)
    told = rows(asked.body)
    assert asked.subject == "Go on with capture to benchmark of edition main?"
    assert told["Hidden states"] == ["5.53 GB (7,200,000 tokens x 768 bytes)"]
    assert told["Still to be written"] == ["5.00 GB"]
    assert told["Disk"] == ["77.00 GB free, 27.00 GB of them stay free"]
    assert told["Hours of capture"] == ["2.0 h (7,200,000 tokens / 1,000 tokens/s)"]
    assert told["Hours of training"][0].startswith("3.0 h (7,200,000 tokens x 3 epochs")
    assert told["Hours in all"] == ["5.5 h"]
    assert told["Cost"] == ["110.0 EUR (5.5 h x 20.00 EUR)"]
    assert told["Latest benchmark of the edition"] == ["acceptance length 2.69, 2026-12-01 12:00 UTC"]


def test_what_a_capture_measured_and_what_is_there_already_are_believed_before_what_was_expected():
    measured = {
        "missing_tokens": 3_600_000, "tokens_per_second": 2000.0, "hours": 0.5, "window_bytes": None,
        "rate_source": "measured by this edition's latest capture",
    }  # fmt: skip
    forecast = manifest("forecast", {**FORECAST.counts, **measured})
    settings = SETTINGS.model_copy(update={"expected_rates": RATES})
    told = rows(question("capture", settings, RunParameters(), {**EDITION, ("forecast", None): forecast}).body)
    assert told["Hours of capture"] == [
        "0.5 h (3,600,000 tokens / 2,000 tokens/s, measured by this edition's latest capture)"
    ]
    assert told["Hours in all"] == ["4.0 h"]


def test_whoever_lets_a_forced_run_capture_is_told_of_the_states_that_it_discards():
    forecast = manifest("forecast", {**FORECAST.counts, "present_bytes": 0, "discarded_bytes": 900_000_000_000})
    told = rows(question("capture", SETTINGS, RunParameters(), {**EDITION, ("forecast", None): forecast}).body)
    assert told["Discarded first"] == ["900.00 GB of states that are there: the run is forced"]
    assert "Discarded first" not in rows(question("capture", SETTINGS, RunParameters(), EDITION).body)


def test_states_that_are_streamed_take_what_their_limit_says():
    forecast = manifest("forecast", {**FORECAST.counts, "present_bytes": 0, "window_bytes": 2_000_000_000})
    told = rows(question("capture", SETTINGS, RunParameters(), {**EDITION, ("forecast", None): forecast}).body)
    assert told["Still to be written"] == ["2.00 GB, at once: streamed while training"]


def test_what_is_not_known_is_said_and_the_rest_is_a_least():
    settings = SETTINGS.model_copy(
        update={"expected_rates": RATES.model_copy(update={"training_tokens_per_second": None}), "approvals": PRICE}
    )
    told = rows(question("capture", settings, RunParameters(), EDITION).body)
    assert told["Hours of training"] == ["not known: its rate is not known"]
    assert told["Hours in all"] == ["at least 2.5 h; training not known"]
    assert told["Cost"] == ["at least 50.0 EUR (2.5 h x 20.00 EUR)"]

    bare = rows(
        question("capture", SETTINGS, RunParameters(), {k: v for k, v in EDITION.items() if v != BENCHMARK}).body
    )
    assert (bare["Hours in all"], bare["Cost"]) == (["not known"], ["not known: approvals.cost_per_hour is not set"])
    assert bare["Latest benchmark of the edition"] == ["none: no pilot, and no earlier run, was measured"]


def test_a_run_that_ends_early_is_asked_for_its_own_hours_only():
    settings = SETTINGS.model_copy(update={"expected_rates": RATES, "approvals": PRICE})
    asked = question("capture", settings, RunParameters.model_validate({"to": "capture"}), EDITION)
    assert asked.subject == "Go on with capture of edition main?"
    assert rows(asked.body)["Hours in all"] == ["2.0 h"]


def test_publishing_is_decided_by_the_gate_and_a_row_for_each_data_set():
    asked = question("publish", SETTINGS, RunParameters(), EDITION)
    told = rows(asked.body)
    assert asked.subject == "Publish drafter main-abcdef012345?"
    assert told["B1_glaive"] == ["8", "2.69", "1.02", "56%", "1,395", "327", "1.21x", "yes"]
    assert told["B2_opencodeinstruct"][-1] == "**NO**"
    assert list(told)[2:5] == ["B1_glaive", "B2_opencodeinstruct", "**All**"]
    assert told["1"] == ["1,395", "327", "2.50x"]
    assert "- threshold: **passed**: acceptance length 2.687 is at least 2.5" in asked.body
    assert "promised 2.82: what is served is -4.7% from it" in asked.body
    assert "Recommended to serve with: 3 draft steps, top-k 4, 16 draft tokens" in asked.body
    assert "main-abcdef012345`" in asked.body


def test_a_data_set_whose_answers_were_all_one_token_long_has_no_acceptance_and_no_error():
    none = {**FIGURES, "acceptance_length": None, "acceptance_length_untrained": None, "acceptance_rate": None}
    counts = {**BENCHMARK.counts, "per_dataset": {"B1_glaive": none}}
    asked = question("publish", SETTINGS, RunParameters(), {("benchmark", None): manifest("benchmark", counts)})
    assert rows(asked.body)["B1_glaive"][1:4] == ["-", "-", "-"]


def test_an_edition_that_has_nothing_to_approve_is_told_what_to_run():
    with pytest.raises(BadInput, match="no manifest of benchmark"):
        question("publish", SETTINGS, RunParameters(), {})


def test_a_price_without_a_currency_is_refused():
    with pytest.raises(ValueError, match="expected both or neither"):
        ApprovalSettings(cost_per_hour=20)


def test_publishing_is_asked_about_too_where_no_draft_setting_is_recommended():
    benchmark = manifest("benchmark", {**BENCHMARK.counts, "recommended": None})
    asked = question("publish", SETTINGS, RunParameters(), {**EDITION, ("benchmark", None): benchmark})
    assert "Recommended to serve with: **no draft setting** (" in asked.body
