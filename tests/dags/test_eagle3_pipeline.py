import subprocess
import sys

import pytest

from aerie.errors import BadInput
from aerie.pipeline import RunParameters, place_of
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import DATASET_KEYS, GENERATED_KEYS


@pytest.fixture(scope="module")
def dag():
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(PROJECT_ROOT / "dags"))
    assert bag.import_errors == {}
    return bag.dags["eagle3_pipeline"]


def test_every_data_set_has_its_own_task_group(dag):
    groups = set(dag.task_group.children)
    assert groups >= set(DATASET_KEYS)
    for key in GENERATED_KEYS:
        assert {f"{key}.prepare", f"{key}.generate", f"{key}.validate"} <= set(dag.task_ids)


def test_the_server_is_stopped_after_each_phase_and_before_the_next_one_starts(dag):
    for phase, work in (("generate", "B1_glaive.generate"), ("capture", "capture"), ("benchmark", "benchmark")):
        start, stop = dag.get_task(f"start_server_{phase}"), dag.get_task(f"stop_server_{phase}")
        assert start.is_setup and stop.is_teardown
        assert work in stop.upstream_task_ids
        assert f"start_server_{phase}" in dag.get_task(work).upstream_task_ids
    assert "stop_server_generate" in dag.get_task("start_server_capture").upstream_task_ids
    assert "stop_server_capture" in dag.get_task("start_server_benchmark").upstream_task_ids


def test_nothing_after_the_gate_runs_when_the_benchmark_fails(dag):
    assert "benchmark" in dag.get_task("publish").upstream_task_ids


def test_a_run_that_is_marked_failed_ends_failed(dag):
    assert dag.get_task("close_run").on_failure_fail_dagrun


def test_no_heavy_library_is_imported_to_parse_the_dag():
    heavy = "torch transformers datasets speculators sglang pyarrow pandas"
    program = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print([name for name in sys.argv[2].split() if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(PROJECT_ROOT / "dags" / "eagle3_pipeline.py"), heavy],
        capture_output=True, text=True, check=True,
        env={"PYTHONPATH": f"{PROJECT_ROOT}/include:{PROJECT_ROOT}/plugins", "AIRFLOW_HOME": "/nonexistent/airflow"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"


def place(parameters: RunParameters, stage: str, dataset: str | None = None, phase: str | None = None) -> str:
    return place_of(parameters, stage=stage, dataset=dataset, phase=phase)


def test_a_data_set_that_is_not_selected_is_left_out():
    parameters = RunParameters(datasets=("B1_glaive",))
    assert place(parameters, "prepare", "B2_opencodeinstruct") == "outside"
    assert place(parameters, "prepare", "B1_glaive") == "inside"


def test_from_and_to_bound_the_run_and_take_the_servers_with_them():
    parameters = RunParameters.model_validate({"from": "validate", "to": "capture"})
    assert place(parameters, "generate", "B1_glaive") == "before"
    assert place(parameters, "serve_start", phase="generate") == "before"
    assert place(parameters, "serve_start", phase="capture") == "inside"
    assert place(parameters, "serve_stop", phase="benchmark") == "outside"
    assert place(parameters, "train") == "outside"
    assert place(parameters, "plan") == "inside"


def test_a_pilot_ends_at_the_acceptance_gate_and_leaves_out_what_would_make_it_long():
    pilot = RunParameters(pilot=True)
    assert place(pilot, "benchmark") == place(pilot, "generate", "B1_glaive") == "inside"
    assert place(pilot, "publish") == place(pilot, "import", "A1") == "outside"
    assert place(RunParameters.model_validate({"pilot": True, "to": "merge"}), "vocabulary") == "outside"
    with pytest.raises(ValueError, match="a pilot of A1: expected a data set that is generated"):
        RunParameters(pilot=True, datasets=("A1",))


@pytest.mark.parametrize(
    "wrong", [{"edition": "Main"}, {"edition": "../main"}, {"to": "deploy"}, {"budget_tokens": -1}]
)
def test_a_wrong_parameter_is_refused_by_name(wrong):
    from aerie_airflow.operators import parameters_of

    with pytest.raises(BadInput, match=next(iter(wrong))):
        parameters_of({"params": wrong})
