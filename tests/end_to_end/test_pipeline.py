"""One real run: Airflow, PostgreSQL, SGLang, a real verifier, from prompts to a benchmarked drafter."""

import os
import signal

import pytest

from aerie.serving.lease import read_lease

from .conftest import Run, Stack

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
    assert run.wait() == "success"
    run.check_log_equals_ledger("B1_glaive")
