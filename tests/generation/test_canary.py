"""The canary: which prompts, what they must show, and the same rates during the run."""

import asyncio
import math
import os
import re
import sys
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from aiohttp import web

from aerie.artefacts.previews import Preview, iterate_previews
from aerie.errors import Failed
from aerie.generation import canary_show
from aerie.generation.budget import Limits
from aerie.generation.canary import CanaryReport, RateWatch, canary_criteria, choose_canary, quarantine_criterion
from aerie.generation.decoding import decode, preview_lines
from aerie.generation.population import Population
from aerie.generation.prompts import GenerationPrompt
from aerie.settings.pipeline import CanarySettings, GenerationSettings
from aerie.store.connection import connected
from aerie.store.queries.ledger import LedgerRow
from aerie.store.queries.previews import list_previews

from .conftest import DATASET, manifest_of
from .fake_server import reply, sample_of


def prompts_of(lengths) -> list[GenerationPrompt]:
    """Prompts in admission order, of these lengths in tokens."""
    return [
        GenerationPrompt(f"s{rank}", "train", rank, range(int(length)), "h", 256, None)
        for rank, length in enumerate(lengths)
    ]


def heavy_tailed(random: np.random.Generator, size: int) -> np.ndarray:
    return np.maximum(random.lognormal(math.log(400), 1.2, size).astype(int), 1)


def population_of(prompts, *, max_prompts=None, rows=None, prompts_in_canary=8) -> Population:
    rows = rows or {prompt.sample_id: LedgerRow(prompt.sample_id, "pending") for prompt in prompts}
    return Population(
        prompts, rows, limits=Limits(None), max_prompts=max_prompts, about_tools=False, thinking=True,
        canary=CanarySettings(prompts=prompts_in_canary), settings=GenerationSettings(), alert=lambda *_: None,
    )  # fmt: skip


def ids(prompts) -> list[str]:
    return [prompt.sample_id for prompt in prompts]


def test_the_canary_has_a_prompt_of_every_length_class_even_where_the_first_ones_are_all_short():
    lengths = [*[10] * 12, *range(100, 2000, 95)]
    chosen = sorted(len(prompt.prompt_ids) for prompt in choose_canary(prompts_of(lengths), 8))
    classes = [sorted(lengths)[start : start + 4] for start in range(0, 32, 4)]
    assert all(length in of_class for length, of_class in zip(chosen, classes, strict=True))


def test_prompts_of_one_length_are_taken_in_admission_order():
    assert ids(choose_canary(prompts_of([5] * 100), 8)) == [f"s{rank}" for rank in range(8)]


@pytest.mark.parametrize("count", [0, 1, 3, 8, 9])
def test_fewer_prompts_than_the_canary_asks_for_are_all_in_it(count):
    assert len(choose_canary(prompts_of(range(1, count + 1)), 8)) == min(count, 8)


def test_a_resume_and_a_raised_max_prompts_keep_the_canary_and_what_was_tried():
    prompts = prompts_of(heavy_tailed(np.random.default_rng(1), 200))
    whole = population_of(prompts)
    half = {p.sample_id: LedgerRow(p.sample_id, "kept" if p.admission_rank % 2 else "pending") for p in prompts}
    assert ids(population_of(prompts, rows=half).canary) == ids(whole.canary)
    before: set[str] = set()
    for allowed in (3, 8, 20, 150, None):
        population = population_of(prompts, max_prompts=allowed)
        assert ids(population.canary) == ids(whole.canary)[:allowed]
        assert before <= set(ids(population.eligible)) and len(population.eligible) == (allowed or 200)
        before = set(ids(population.eligible))


@pytest.mark.parametrize("ties", [1, 200], ids=["distinct lengths", "many of one length"])
@pytest.mark.parametrize("tried", [8, 20, 32, 60])
def test_whatever_a_cap_leaves_out_the_canary_prefers_no_length(tried, ties):
    differences = []
    for seed in range(200):
        lengths = np.ceil(heavy_tailed(np.random.default_rng(seed), 120) / ties).astype(int)
        capped = population_of(prompts_of(lengths), max_prompts=tried).eligible
        # Logarithms: the means of a heavy tail would hide a preference behind their noise.
        differences.append(fmean(math.log(len(p.prompt_ids)) for p in capped) - fmean(np.log(lengths)))
    assert abs(fmean(differences)) < 3 * stdev(differences) / math.sqrt(len(differences))


def row(**changes) -> LedgerRow:
    given = {
        "sample_id": "s", "state": "kept", "completion_tokens": 100, "reasoning_tokens": 50, "tool_calls": 1,
    }  # fmt: skip
    return LedgerRow(**{**given, **changes})


GOOD = row()
LOOP = row(state="quarantined", reasons=("loop",))
CUT = row(flags=("truncated_in_reasoning",), reasoning_tokens=100, tool_calls=0)


@pytest.mark.parametrize(
    ("bad", "failed"),
    [
        (row(state="quarantined", reasons=("tool_unbalanced",)), {"corrupt"}),
        (LOOP, {"corrupt", "loops"}),
        (row(state="quarantined", reasons=("empty_reasoning",)), {"corrupt", "empty_reasoning"}),
        (row(reasoning_tokens=0), {"empty_reasoning"}),
        (CUT, {"truncated"}),
        (row(flags=("truncated_in_tool_call",)), {"truncated"}),
        (row(flags=("truncated_in_answer",)), {"truncated"}),
        (row(reasoning_tokens=96, tool_calls=0), {"short_answers"}),
        (row(reasoning_tokens=96), set()),
        (row(reasoning_tokens=95, tool_calls=0), set()),
        (row(state="quarantined", reasons=("policy:repetition",), flags=("repetition",)), set()),
        (replace(CUT, state="quarantined", reasons=("policy:truncated_in_reasoning",)), {"truncated"}),
    ],
)  # fmt: skip
def test_each_failure_trips_its_own_criterion(bad, failed):
    criteria = canary_criteria(CanarySettings(), about_tools=False, thinking=True)
    report = CanaryReport.of(criteria, [*[GOOD] * 13, *[bad] * 19])
    assert {measure.criterion.name for measure in report.failures} == failed
    assert not CanaryReport.of(criteria, [*[GOOD] * 31, bad]).failures, "one row of 32 is not a rate"


def test_a_share_that_equals_its_limit_passes_and_no_rows_say_nothing():
    criteria = canary_criteria(CanarySettings(minimum_tool_share=0.5), about_tools=True, thinking=True)
    assert not CanaryReport.of(criteria, [*[GOOD] * 9, LOOP]).failures
    assert not CanaryReport.of(criteria, [GOOD, row(tool_calls=0)]).failures
    assert not CanaryReport.of(criteria, []).failures


@pytest.mark.parametrize(
    "bad",
    [row(tool_calls=0), row(flags=("truncated_in_tool_call",)), row(state="quarantined", reasons=("tool_unbalanced",))],
)
def test_only_a_whole_tool_section_counts_for_data_about_tools(bad):
    settings = CanarySettings(maximum_corrupt_share=1, maximum_truncated_share=1)
    report = CanaryReport.of(canary_criteria(settings, about_tools=True, thinking=True), [GOOD, *[bad] * 15])
    assert [measure.criterion.name for measure in report.failures] == ["tool_sections"]
    assert not CanaryReport.of(canary_criteria(settings, about_tools=False, thinking=True), [bad] * 9).failures


def test_a_verifier_that_is_not_asked_to_reason_need_not():
    criteria = canary_criteria(CanarySettings(), about_tools=False, thinking=False)
    assert not CanaryReport.of(criteria, [row(reasoning_tokens=0)] * 9).failures


def test_a_refusal_lists_every_criterion_with_count_share_and_limit_and_says_what_to_do():
    criteria = canary_criteria(CanarySettings(), about_tools=True, thinking=True)
    text = CanaryReport.of(criteria, [LOOP] * 2 + [CUT] * 6).refusal
    assert "2 of 8 responses are corrupt (25.0%, at most 10.0% by canary.maximum_corrupt_share)" in text
    assert "6 of 8 responses were cut by max_new_tokens (75.0%, at most 50.0%" in text
    assert "0 of 8 responses hold a well-formed tool section (0.0%, at least 10.0%" in text
    assert "truncated_in_reasoning 6 times, loop 2 times" in text
    assert "./aerie quarantine regenerate" in text


def test_the_samples_shown_are_one_kept_one_bad_and_the_longest_each_once():
    rows = [replace(GOOD, sample_id=f"s{n}", completion_tokens=100 + n) for n in range(5)]
    bad, cut = replace(LOOP, sample_id="bad"), replace(CUT, sample_id="cut")

    def shown(*judged):
        return [row.sample_id for row in CanaryReport((*judged,), ()).samples()]

    assert shown(cut, *rows, bad) == ["s0", "bad", "s4"]
    assert shown(cut, *rows) == ["s0", "cut", "s4"]
    assert shown(*rows) == ["s0", "s4", "s3"]
    assert shown(bad) == ["bad"]


def test_a_rate_is_of_the_latest_responses_only_and_needs_a_full_window():
    watch = RateWatch([quarantine_criterion(GenerationSettings(maximum_quarantine_share=0.25))], 8)
    for judged in [LOOP] * 7:
        watch.observe(judged)
    assert not watch.failing() and watch.failing(fewest=4)[0].count == 7
    watch.observe(LOOP)
    assert watch.failing()[0].count == 8
    for _ in range(6):
        watch.observe(GOOD)
    assert not watch.failing(), "what has left the window still counts"


def test_truncation_above_its_share_is_alerted_once_counted_by_place_and_stops_nothing(world):
    cut = reply(list(range(1, 257)), 5, finish_reason={"type": "length", "length": 256})
    in_answer = reply([*range(1, 100), 903, *range(1, 157)], 5, finish_reason={"type": "length", "length": 256})

    def fault(body, before):
        number = int(sample_of(body)[1:])
        return in_answer if number == 20 else cut if number >= 20 else None

    world.server.fault = fault
    counts = manifest_of(world.run(generation={"quarantine_window": 10})).counts
    assert (counts["kept"], counts["stopped_by"]) == (40, "prompts_exhausted")
    assert (counts["truncated_in_reasoning"], counts["truncated_in_answer"], counts["truncated_in_tool_call"]) == (
        19, 1, 0,
    )  # fmt: skip
    (alert,) = world.warnings()
    assert alert["reason"] == "truncated"
    assert (
        f"main/{DATASET}: lately 3 of 10 responses were cut by max_new_tokens (30.0%, at most 20.0%" in alert["message"]
    )
    figures = world.events("metric")[-1]["figures"]
    assert (figures["truncated_in_reasoning"], figures["truncated_in_answer"]) == (19, 1)
    messages = [event["message"] for event in world.events("progress")]
    assert "  truncated: truncated_in_reasoning 19, truncated_in_answer 1, truncated_in_tool_call 0" in messages


def test_a_data_set_too_small_for_the_window_is_alerted_of_its_rates_at_the_end(world):
    cut = reply(list(range(1, 257)), 5, finish_reason={"type": "length", "length": 256})
    world.server.fault = lambda body, before: cut if int(sample_of(body)[1:]) >= 30 else None
    assert manifest_of(world.run()).counts["kept"] == 40
    assert [alert["reason"] for alert in world.warnings()] == ["truncated"]


def test_a_canary_cut_by_the_cap_is_refused_before_the_rest_is_generated(world):
    cut = reply(list(range(1, 257)), 5, finish_reason={"type": "length", "length": 256})
    world.server.fault = lambda body, before: cut
    with pytest.raises(Failed, match="stopped by canary: 4 of 4 responses were cut by max_new_tokens"):
        world.run()
    assert len(world.server.requests) == 4
    assert manifest_of(world.run(canary={"prompts": 4, "maximum_truncated_share": 1})).counts["kept"] == 40


def messages(world) -> list[str]:
    return [event["message"] for event in world.events("progress")]


def test_a_passed_canary_says_its_shares_and_the_time_for_the_budget_and_shows_three_samples(world):
    world.server.delay_seconds = 0.05
    world.run(budget_tokens=1500)
    (line,) = (message for message in messages(world) if message.startswith("canary"))
    assert line.startswith("canary passed: 4 responses, corrupt 0.0%, truncated 0.0%, ")
    assert re.search(r"; mean \d+ tokens, [\d,]+ tok/s; at this rate \d+ s for the 1,\d+ response tokens", line)
    samples = [message for message in messages(world) if message.startswith("Sample ")]
    assert [sample.split(":")[0] for sample in samples] == [f"Sample {n} of 3" for n in (1, 2, 3)]
    shown = [preview.sample_id for preview in iterate_previews(world.files.canary_previews)]
    with connected(world.database_url) as connection:
        stored = list_previews(connection, edition="main", dataset=DATASET)
    assert {row["sample_id"] for row in stored} == set(shown) and len(shown) == 3


def test_a_passed_canary_times_the_run_again_by_what_it_measured(world):
    world.server.delay_seconds = 0.05
    world.run(budget_tokens=1500)
    (line,) = (message for message in messages(world) if message.startswith("Timeline after the canary"))
    assert re.search(rf"canary: {DATASET} 0\.0 h \(1,500 tokens - [\d,]+ there / [\d,]+ tokens/s\)", line)
    assert re.search(r"generation of all data sets (0\.0 h, until \d{4}-|not known yet)", line)
    last = world.events("metric")[-1]["figures"]
    assert 0 < last["timeline_dataset_hours_low"] == last["timeline_dataset_hours_high"]


def test_the_canary_is_shown_once_and_a_failed_one_is_shown_too(world):
    cut = reply(list(range(1, 257)), 5, finish_reason={"type": "length", "length": 256})
    world.server.fault = lambda body, before: cut
    with pytest.raises(Failed, match="stopped by canary"):
        world.run()
    world.server.fault = lambda body, before: None
    world.run(budget_tokens=1500, canary={"prompts": 4, "maximum_truncated_share": 1})
    lines = [message for message in messages(world) if message.startswith(("canary", "Sample 1 ", "Timeline"))]
    assert [line.split(":")[0] for line in lines] == ["canary did not pass", "Sample 1 of 3"]


def test_a_canary_of_failed_requests_is_not_said_to_have_passed(world):
    world.server.fault = lambda body, before: web.Response(status=400, text="no") if sample_of(body) != "s0" else None
    with pytest.raises(Failed, match="stopped by errors"):
        world.run()
    (line,) = (message for message in messages(world) if message.startswith("canary"))
    assert line.startswith("canary did not pass: 1 responses, 3 failed requests, ")


def test_samples_that_cannot_be_decoded_are_an_alert_and_generation_goes_on(world, monkeypatch):
    async def fail(request, responses):
        raise Failed("decoding ended with status 2: no tokenizer")

    monkeypatch.setattr(canary_show, "decode", fail)
    assert manifest_of(world.run()).counts["kept"] == 40
    (alert,) = world.warnings()
    assert alert["reason"] == "samples_not_decoded" and "no tokenizer; generation goes on" in alert["message"]
    assert alert["message"] in messages(world) and not world.files.canary_previews.exists()


def test_a_signal_that_ends_a_task_is_no_alert_of_samples_that_cannot_be_decoded(world, tmp_path, monkeypatch):
    """Airflow signals the whole process group of a task: what decodes is not in it, and ends with the stage."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\nsys.exit(str(os.getpgid(0)))\n")
    python.chmod(0o755)
    monkeypatch.setenv("AERIE_MODEL_PYTHON", str(python))
    with pytest.raises(Failed, match="decoding ended with status 1: ") as failed:
        asyncio.run(decode(world.request(), []))
    assert int(str(failed.value).split()[-1]) != os.getpgid(0)


def test_a_data_set_no_larger_than_its_canary_still_shows_it(world):
    world.run(max_prompts=3)
    assert sum(message.startswith(("canary passed: 3 ", "Sample ")) for message in messages(world)) == 4


def test_a_canary_whose_samples_were_lost_with_the_process_shows_them_in_the_next_run(world):
    world.run(max_prompts=10)
    world.files.canary_previews.unlink()
    world.run(max_prompts=20)
    assert sum(message.startswith("Sample 1 ") for message in messages(world)) == 2


def test_a_decoded_row_shows_its_boundary_and_its_special_tokens_and_is_cut_in_its_middle():
    preview = Preview(
        sample_id="s1", conversation_id="c", split="train", verdict="quarantined", reasons=("loop",), flags=(),
        positions={"loop": (3, 9)}, prompt_tokens=1000, response_tokens=20, reasoning_tokens=7,
        spans=(
            ("prompt", "a" * 500 + "b" * 500 + "<think>"), ("reasoning", "one\ntwo"), ("boundary", "</think>"),
            ("answer", "three"), ("tool", "<|call|>"), ("tool_id", "f:0"), ("tool", "<|end|>"), ("end", "<|im_end|>"),
        ),
    )  # fmt: skip
    assert list(preview_lines(preview, characters=20)) == [
        "s1: quarantined (loop), 1,000 prompt tokens, 20 of response, 7 of them reasoning",
        "     prompt | aaaaaaaaaa [... 987 characters ...] bbb<think>",
        "  reasoning | one\u23cetwo",
        "   boundary | </think>",
        "     answer | three",
        "      tools | <|call|>f:0<|end|>",
        "        end | <|im_end|>",
    ]
