"""One real run: Airflow, PostgreSQL, SGLang, a real verifier, from prompts to a benchmarked drafter."""

import os
import signal
from urllib.parse import quote

import pytest

from aerie.serving.lease import read_lease

from ..chromium import take_screenshots
from .conftest import Run, Stack, signed_in

KEYS = ["B1_glaive", "A1"]
EDITION = "end_to_end"
GENERATE = "B1_glaive.generate"


@pytest.fixture(scope="module")
def first_run(stack: Stack) -> Run:
    return stack.run_to_its_end(datasets=KEYS, edition=EDITION)


@pytest.mark.timeout(1200)
def test_prompts_become_a_measured_drafter(stack, first_run):
    states = first_run.states()
    assert states["B3_magicoder.generate"] == "skipped"
    assert states["benchmark"] == states["publish"] == "success"
    ((summary,),) = stack.query("SELECT summary FROM runs WHERE run_id = %s", first_run.run_id)
    generated = summary["datasets"]["B1_glaive"]
    assert generated["stopped_by"] == "budget"
    assert generated["generated"] < generated["prompts"]
    assert generated["response_tokens"] >= generated["budget"]
    assert generated["reasoning_share"] == 1.0
    assert summary["datasets"]["A1"]["stopped_by"] == "imported"
    assert summary["hidden_states"]["files"] == summary["corpus"]["rows"]
    assert summary["training"]["last_loss"] < summary["training"]["first_loss"]
    assert summary["benchmark"]["acceptance_length"] > 1.1
    assert summary["benchmark"]["lossless"] is True


def test_the_dashboard_shows_the_run_on_every_page(stack, first_run, browser):
    dataset = f"/editions/{EDITION}/datasets/B1_glaive"
    ((summary,),) = stack.query("SELECT summary FROM runs WHERE run_id = %s", first_run.run_id)
    ((drafter,),) = stack.query("SELECT drafter_id FROM drafters WHERE edition = %s", EDITION)
    decoded = "SELECT sample_id FROM previews JOIN samples USING (edition, dataset, sample_id) WHERE edition = %s"
    (sample,) = stack.query(f"{decoded} AND dataset = 'B1_glaive' AND state = 'kept' ORDER BY 1 LIMIT 1", EDITION)[0]
    launches = "SELECT launch_token FROM leases WHERE document -> 'plan' ->> 'phase' = 'generate'"
    ((launch,),) = stack.query(f"{launches} ORDER BY recorded_at DESC LIMIT 1")
    acceptance = f"{summary['benchmark']['acceptance_length']:.2f}"
    tokens = f"{summary['datasets']['B1_glaive']['response_tokens']:,}"
    pages = {
        "overview": ("/", acceptance),
        "run": (f"/runs/{quote(first_run.run_id, safe='')}", tokens),
        "servers": ("/servers", "stopped by its run"),
        "server_log": (f"/servers/{launch}/log", "Prefill batch"),
        "dataset": (dataset, tokens),
        "samples": (f"{dataset}/samples?decoded=true", sample),
        "sample": (f"{dataset}/samples/{sample}", "</think>"),
        "responses": (f"{dataset}/responses", "responses.jsonl"),
        "corpus_report": (f"/editions/{EDITION}/corpus/report", f"Corpus of edition {EDITION}"),
        "drafters": ("/drafters", drafter),
        "drafter": (f"/drafters/{drafter}", acceptance),
    }
    with signed_in(stack, browser, "/") as page:
        for name, (path, shown) in pages.items():
            page.goto(f"{stack.airflow_url}/aerie{path}")
            page.get_by_text(shown).filter(visible=True).first.wait_for()
            assert page.locator(".problem").all_inner_texts() == [], name
            take_screenshots(page, f"real-{name}")


def test_every_prompt_is_in_exactly_one_state_and_the_log_agrees_with_the_ledger(first_run):
    first_run.check_log_equals_ledger("B1_glaive")


def test_the_servers_are_gone_after_the_run(stack, first_run):
    assert first_run.task_state("start_server_generate") == "success", "no server was started"
    assert read_lease(stack.server_folder) is None
    assert stack.served() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_run_of_the_same_edition_finds_everything_done(stack, first_run):
    run = stack.run_to_its_end(datasets=KEYS, edition=EDITION)
    durations = {name: task["duration"] for name, task in run.tasks().items() if task["state"] == "success"}
    assert max(durations.values()) < 60, durations
    for task_id in (GENERATE, "A1.validate", "merge", "capture", "train", "benchmark"):
        assert "nothing to do" in run.log(task_id, 1), task_id


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_generating_task_that_is_ended_is_tried_again_and_goes_on_from_its_ledger(stack):
    run = stack.trigger(datasets=["B1_glaive"], edition="ended", budget_tokens=0, to="validate")
    run.until(lambda: run.kept() >= 20)
    os.kill(run.task(GENERATE)["pid"], signal.SIGTERM)
    run.until(lambda: run.task(GENERATE)["try_number"] == 2 and run.task_state(GENERATE) == "running")
    assert 0 < run.kept() < 120, "the task was not ended in the middle"
    run.must_end_as("success")
    run.check_log_equals_ledger("B1_glaive")
