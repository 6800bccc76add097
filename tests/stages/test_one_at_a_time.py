"""Two runs of one edition: what they would both write waits, and nothing else does."""

import os
import subprocess
import sys

import pytest

from aerie.artefacts.locks import dataset_lock, edition_lock
from aerie.errors import BadInput, Busy
from aerie.pipeline import STEPS
from aerie.settings.machine import PROJECT_ROOT
from aerie.stages import STAGES, run_stage

MINE = "B3_magicoder"
OF_A_DATA_SET = ("prepare", "generate", "validate")
OF_THE_EDITION = STEPS[STEPS.index("merge") :]


@pytest.fixture
def run(make_request, tmp_path):
    """Runs a stage here, as its process would."""

    def run(stage, dataset=None):
        path = tmp_path / "request.json"
        path.write_text(make_request(dataset=dataset).model_dump_json())
        return run_stage(stage, request=path, result=tmp_path / "result.json", events=tmp_path / "events.jsonl")

    run.files = make_request().files
    return run


def test_every_stage_of_the_pipeline_says_what_it_works_on():
    assert {name: STAGES[name].works_on for name in (*OF_A_DATA_SET, "import")} == dict.fromkeys(
        (*OF_A_DATA_SET, "import"), "dataset"
    )
    assert all(STAGES[name].works_on.startswith("edition") for name in OF_THE_EDITION)


@pytest.mark.parametrize("stage", [*OF_A_DATA_SET, "import"])
def test_a_data_set_that_another_run_works_on_is_waited_for_by_name(run, stage):
    dataset = "A1" if stage == "import" else MINE
    with dataset_lock(run.files, dataset, holder="run other, stage generate"):
        holder = r"run other, stage generate \(process \d+ on .*, since \d{4}-"
        with pytest.raises(Busy, match=f"data set {dataset} of edition main .* {holder}"):
            run(stage, dataset)


@pytest.mark.parametrize("stage", OF_THE_EDITION)
def test_what_the_edition_has_beside_its_data_sets_is_waited_for_too(run, stage):
    with edition_lock(run.files, holder="run other, stage train"), pytest.raises(Busy, match="run other, stage train"):
        run(stage)


def test_nothing_is_merged_while_one_of_the_data_sets_changes_and_none_changes_while_it_is_merged(run):
    with dataset_lock(run.files, MINE, holder="run other, stage validate"), pytest.raises(Busy, match=MINE):
        run("merge")
    with (
        edition_lock(run.files, holder="run other, stage merge", reads=["B1_glaive", MINE]),
        pytest.raises(Busy, match="stage merge"),
    ):
        run("validate", MINE)


def test_other_data_sets_and_the_servers_plan_wait_for_nobody(run):
    with dataset_lock(run.files, "B1_glaive", holder="run other"), edition_lock(run.files, holder="run other"):
        with pytest.raises(BadInput, match=f"{MINE}.*no manifest"):
            run("generate", MINE)
        assert run("plan").stage == "plan"


def test_a_lock_ends_with_its_holder_even_by_sigkill_and_begins_no_data_set(run):
    hold = (
        "import sys; from pathlib import Path; from aerie.artefacts.layout import EditionFiles; "
        "from aerie.artefacts.locks import dataset_lock\n"
        "with dataset_lock(EditionFiles(Path(sys.argv[1]), 'main'), sys.argv[2], holder='run other'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run.files.data_root), MINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include")},
    ) as other:  # fmt: skip
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Busy, match=rf"run other \(process {other.pid} on "):
            run("generate", MINE)
        other.kill()
    with pytest.raises(BadInput, match="no manifest"):
        run("generate", MINE)
    assert not run.files.dataset(MINE).folder.exists()
