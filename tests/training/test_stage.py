"""The stages on a tiny edition: a random verifier of 8 layers, 24 rows, real speculators."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aerie.artefacts.drafter_record import read_record
from aerie.artefacts.files import write_json
from aerie.artefacts.manifest import read_manifest, write_manifest
from aerie.errors import BadInput, Failed
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import DraftSettings
from aerie.training.publishing import publish
from aerie.training.stage import export, train


def test_a_stale_vocabulary_is_refused_before_training(edition):
    edition.build()
    edition.vocabulary([[5, 6, 7, 8, 9]])
    with pytest.raises(Failed, match="stale draft vocabulary"):
        train(edition.request(), edition.events)


def test_states_of_another_corpus_are_refused_before_training(edition):
    edition.build(seed=1)
    states = edition.files.manifest("capture").read_bytes()
    edition.build(seed=2)
    edition.files.manifest("capture").write_bytes(states)
    with pytest.raises(Failed, match="run capture again"):
        train(edition.request(), edition.events)


def test_swapped_state_files_are_found_before_a_step_is_made(edition):
    edition.build()
    first, second = (edition.files.hidden_states / f"hs_{row}.safetensors" for row in (0, 1))
    first_target, second_target = first.readlink(), second.readlink()
    first.unlink(), second.unlink()
    first.symlink_to(second_target), second.symlink_to(first_target)
    with pytest.raises(Failed, match=r"hs_0\.safetensors"):
        train(edition.request(), edition.events)
    assert not edition.files.training.exists()


def test_states_of_another_model_are_found_before_a_step_is_made(edition):
    edition.build()
    change_states(edition, lambda states: states.flip(2))  # the same magnitudes, other directions
    with pytest.raises(Failed, match="another model's states"):
        train(edition.request(), edition.events)
    assert not edition.files.training.exists()


def test_states_after_the_norm_are_found_before_a_step_is_made(edition):
    edition.build()
    change_states(edition, lambda states: states / states.float().square().mean(2, keepdim=True).sqrt())
    with pytest.raises(Failed, match="captured after the final norm"):
        train(edition.request(), edition.events)


@pytest.mark.parametrize(
    ("prompt_tokens", "reason"),
    [(5, "prompt_not_open: .*the loss mask is off by one"), (3, "prompt_not_open"), (1, "prompt_not_open")],
)
def test_masks_that_are_off_the_boundary_are_found_before_a_step_is_made(edition, monkeypatch, prompt_tokens, reason):
    monkeypatch.setattr("tests.training.conftest.PROMPT_TOKENS", prompt_tokens)
    edition.build()
    with pytest.raises(Failed, match=reason):
        train(edition.request(), edition.events)
    assert not edition.files.training.exists()


def change_states(edition, change):
    for row in range(24):
        path = edition.files.hidden_states / f"hs_{row}.safetensors"
        tensors = load_file(path)
        states = change(tensors["hidden_states"]).to(tensors["hidden_states"].dtype)
        save_file({**tensors, "hidden_states": states}, path.resolve())


def test_states_of_another_model_are_refused_before_training(edition):
    edition.build()
    write_json(edition.files.hidden_states / "capture.json", {"verifier": "0123456789abcdef"})
    with pytest.raises(Failed, match=r"captured from model 0123456789ab, but .*verifier"):
        train(edition.request(), edition.events)
    (edition.files.hidden_states / "capture.json").unlink()
    with pytest.raises(BadInput, match="which model they are of"):
        train(edition.request(), edition.events)


def test_rows_that_the_trainer_would_cut_are_refused(edition):
    edition.build()
    with pytest.raises(BadInput, match=r"training\.sequence_length is 16"):
        train(edition.request(training={"sequence_length": 16}), edition.events)


def test_a_run_without_capture_is_told_which_stage_is_missing(edition):
    edition.build()
    edition.files.manifest("capture").unlink()
    with pytest.raises(BadInput, match="capture"):
        train(edition.request(), edition.events)


@pytest.mark.slow
def test_a_drafter_is_trained_exported_and_published_and_a_second_run_does_nothing(edition):
    edition.build()
    board = edition.root / "board"
    result = train(edition.request(training={"tensorboard": board}), edition.events)
    counts = result.manifest.counts
    (of_this_training,) = board.iterdir()
    curves = EventAccumulator(str(of_this_training)).Reload()
    assert len(curves.Scalars("train/loss")) == counts["steps"]
    assert (counts["epochs"], counts["layers"], counts["checkpoint"] in ("0", "1")) == (2, [2, 4, 5], True)
    assert counts["steps"] > 10
    assert counts["last_loss"] < counts["first_loss"]
    assert counts["validation"]["estimated_acceptance_length"] >= 1
    assert train(edition.request(), edition.events).reused

    # As a kill leaves it that comes between the last epoch's checkpoint and its validation.
    log = edition.files.training / "train.log"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if not ("val/loss_epoch" in line and "epoch=1" in line)))
    edition.files.manifest("train").unlink()
    again = train(edition.request(), edition.events).manifest.counts
    assert (again["resumed_from_step"], again["steps"], again["last_loss"]) == (
        counts["steps"], counts["steps"], counts["last_loss"],
    )  # fmt: skip
    assert again["validation"] == counts["validation"]
    assert "epoch 2 was ended before it was validated: validating it first" in edition.messages()

    exported = export(edition.request(), edition.events).manifest
    served = load_file(edition.files.drafter / "model.safetensors")
    untrained = load_file(edition.files.untrained_drafter / "model.safetensors")
    assert served.keys() == untrained.keys()
    assert not served["fc.weight"].equal(untrained["fc.weight"])
    assert served["lm_head.weight"].equal(untrained["lm_head.weight"])  # the verifier's rows, frozen
    for_vllm = load_file(edition.files.vllm_drafter / "model.safetensors")
    assert for_vllm["layers.0.mlp.up_proj.weight"].equal(served["midlayer.mlp.up_proj.weight"])
    told = json.loads((edition.files.vllm_drafter / "config.json").read_text())
    assert len(told["eagle_aux_hidden_state_layer_ids"]) == 3
    verifier = told["speculators_config"]["verifier"]["name_or_path"]
    assert verifier == str(edition.request().settings.verifier.path.resolve())
    assert export(edition.request(), edition.events).reused
    assert read_record(edition.files.drafter).draft is None  # not measured yet
    assert exported.counts["record"] == read_record(edition.files.drafter).model_dump(mode="json")

    measure(edition, exported.fingerprint)
    published = publish(edition.request(), edition.events)
    folder = edition.root / "published" / f"main-{exported.fingerprint[:12]}"
    names = {"README.md", "aerie.json", "config.json", "model.safetensors", "vllm"}
    assert {path.name for path in folder.iterdir()} == names
    weights = (edition.files.vllm_drafter / "model.safetensors").read_bytes()
    assert (folder / "vllm" / "model.safetensors").read_bytes() == weights
    for place in (folder, edition.files.drafter):
        record = read_record(place)
        assert record.fingerprint == exported.fingerprint
        assert record.stages.keys() == {"merge", "vocabulary", "capture", "train", "benchmark"}
        assert record.draft == DraftSettings(num_steps=2, eagle_topk=1, num_draft_tokens=3)
        assert "| B1_glaive | 8 | 2.75 |" in (place / "README.md").read_text()
    assert published.data["drafter_fingerprint"] == exported.fingerprint
    assert publish(edition.request(), edition.events).reused

    measure(edition, "of another drafter")
    with pytest.raises(Failed, match="run benchmark again"):
        publish(edition.request(force=True), edition.events)


def measure(edition, drafter_fingerprint):
    row = {"prompts": 8, "acceptance_length": 2.75, "tokens_per_second": 90.0, "tokens_per_second_without": 50.0}
    write_manifest(
        edition.files.manifest("benchmark"),
        stage="benchmark",
        edition="main",
        dataset=None,
        fingerprint="benchmark",
        inputs=[],
        outputs=[],
        counts={
            **row,
            "drafter_fingerprint": drafter_fingerprint,
            "acceptance_length_untrained": 1.02,
            "losslessness": {"said": "greedy output identical"},
            "by_concurrency": [{"concurrency": 8, **row}],
            "definition": "completion tokens / verify steps",
            "settings": {"num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3},
            "per_dataset": {"B1_glaive": row},
        },
    )


@pytest.mark.slow
def test_rows_whose_states_belong_to_others_fail_the_training_that_speculators_would_finish(edition, monkeypatch):
    edition.build()
    monkeypatch.setattr(
        "aerie.training.stage.verify",
        lambda *_, **__: SimpleNamespace(rows=0, tokens=0, bytes=0),
    )
    for row in range(24):
        path = edition.files.hidden_states / f"hs_{row}.safetensors"
        tensors = load_file(path)
        save_file({**tensors, "token_ids": tensors["token_ids"].flip(0) + 1}, path.resolve())
    with pytest.raises(Failed, match="error_records"):
        train(edition.request(), edition.events)
    assert not edition.files.manifest("train").exists()


STEPS_OF_AN_EPOCH = 75
"""At most; of 200 rows."""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_training_whose_stage_is_ended_or_killed_resumes_where_it_stopped(edition, number, status):
    edition.build(rows=200, validation_rows=8)
    request = edition.root / "request.json"
    settings = {"epochs": 6}  # enough that it does not end by itself before it is ended
    request.write_text(edition.request(training=settings).model_dump_json())
    arguments = [
        "--request",
        request,
        "--result",
        edition.root / "result.json",
        "--events",
        edition.root / "stage.jsonl",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "aerie", "stage", "train", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include")},
    )
    steps = edition.files.training / "steps.jsonl"
    checkpoints = edition.files.training / "checkpoints"
    wait_for(
        lambda: (checkpoints / "0/training_state.json").exists() and steps_read(steps) > STEPS_OF_AN_EPOCH, process
    )
    process.send_signal(number)  # to the stage alone, as Airflow's on_kill does
    assert process.wait(timeout=180) == status
    shutil.copyfile(steps, edition.root / "steps.before")

    result = train(edition.request(training=settings), edition.events)
    resumed = result.manifest.counts["resumed_from_step"]
    made = [json.loads(line)["global_step"] for line in (edition.root / "steps.before").read_text().splitlines()]
    # A killed stage has not read the trainer's last lines.
    assert STEPS_OF_AN_EPOCH < made[-1] <= resumed < result.manifest.counts["steps"]
    after = [json.loads(line)["global_step"] for line in steps.read_text().splitlines()][len(made) :]
    assert after[0] == resumed
    assert after == list(range(resumed, result.manifest.counts["steps"]))
    assert read_manifest(edition.files.manifest("train")).counts["checkpoint"]


def steps_read(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the stage ended with {process.returncode}"
        assert time.monotonic() < deadline, "the training did not get that far"
        time.sleep(0.05)
