import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

from aerie.errors import BadInput
from aerie.pipeline import RunParameters, place_of, run_parameters
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import DATASET_KEYS, GENERATED_KEYS
from aerie.settings.presets import preset_path


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


def test_the_trainer_waits_until_the_server_has_left_the_gpus(dag):
    assert "stop_server_capture" in dag.get_task("train").upstream_task_ids
    pools = {dag.get_task(name).pool for name in ("train", "start_server_generate", "start_server_benchmark")}
    assert pools == {"aerie_gpus"}


def test_tasks_run_where_the_configuration_places_them(monkeypatch, tmp_path):
    configuration = tmp_path / "config.yaml"
    demo = (PROJECT_ROOT / "demo" / "config.yaml").read_text()
    places = "placement: {capture: {queue: gpu-1, pool: other}, train: {queue: gpu-1}}"
    configuration.write_text(f"{demo}\n{places}\n")

    bag = bag_of(monkeypatch, configuration)

    assert bag.import_errors == {}
    tasks = {name: bag.dags["eagle3_pipeline"].get_task(name) for name in ("capture", "train", "merge")}
    assert {name: task.queue for name, task in tasks.items()} == {
        "capture": "gpu-1", "train": "gpu-1", "merge": "default",
    }  # fmt: skip
    assert (tasks["capture"].pool, tasks["merge"].pool) == ("other", "default_pool")


def test_every_task_says_what_it_does_what_it_needs_and_what_to_do_when_it_fails(dag):
    for text in (dag.doc_md, *(task.doc_md for task in dag.tasks)):
        assert "**Needs**" in text and "**When it fails**" in text


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"edition": "Main"}, "edition: 'Main' does not match '^[a-z0-9_-]{1,64}$'"),
        ({"datasets": ["B9_unknown"]}, "datasets: 'B9_unknown' is not one of ['B1_glaive'"),
        ({"datasets": ["A1", "A1"]}, "datasets: ['A1', 'A1'] has non-unique elements"),
        ({"datasets": []}, "datasets: [] should be non-empty"),
        ({"budget_tokens": "many"}, "budget_tokens: 'many' is not of type 'null', 'integer'"),
        ({"budget_tokens": -1}, "budget_tokens: -1 is less than the minimum of 0"),
        ({"to": "deploy"}, "to: 'deploy' is not one of [None, 'prepare'"),
        ({"pilot": "yes"}, "pilot: 'yes' is not of type 'boolean'"),
        ({"approvals": 1}, "approvals: 1 is not of type 'boolean'"),
    ],
)
def test_a_value_that_the_form_does_not_offer_is_refused_before_there_is_a_run(dag, conf, message):
    """Airflow checks a trigger and a backfill so, through UI, CLI and REST."""
    serialised = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    with pytest.raises(ParamValidationError, match=re.escape(message)):
        serialised.params.deep_merge(conf).validate()


def test_the_form_explains_each_field_and_offers_nothing_that_the_pipeline_does_not_know(dag):
    fields = {name: dag.params.get_param(name) for name in dag.params}
    assert set(fields) == {field.alias or name for name, field in RunParameters.model_fields.items()}
    for field in fields.values():
        assert field.schema["title"] and field.schema["description_md"]
    assert run_parameters({name: field.value for name, field in fields.items()}, backfill=False).last_step == "publish"


def test_nothing_after_the_gate_runs_when_the_benchmark_fails(dag):
    assert dag.get_task("publish").upstream_task_ids == {"approve_publish"}
    assert dag.get_task("approve_publish").upstream_task_ids == {"benchmark"}


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


def bag_of(monkeypatch, configuration: Path):
    from airflow.dag_processing.dagbag import DagBag

    monkeypatch.setenv("AERIE_CONFIG", str(configuration))
    return DagBag(str(PROJECT_ROOT / "dags"))


def test_a_preset_is_a_dag_before_its_verifier_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    bag = bag_of(monkeypatch, preset_path("kimi-k25-8x96g"))
    assert bag.import_errors == {}
    assert set(bag.dags["eagle3_pipeline"].task_group.children) >= set(DATASET_KEYS)


def documented(language: str) -> str:
    """A code block of docs/add-a-dataset.md."""
    text = (PROJECT_ROOT / "docs" / "add-a-dataset.md").read_text(encoding="utf-8")
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1]


def test_a_data_set_added_as_the_document_says_has_its_tasks_and_its_place_in_the_form(monkeypatch, tmp_path):
    configuration = tmp_path / "config.yaml"
    demo = (PROJECT_ROOT / "demo" / "config.yaml").read_text()
    configuration.write_text(demo.replace("datasets:\n", f"datasets:\n{documented('yaml')}", 1))

    bag = bag_of(monkeypatch, configuration)

    assert bag.import_errors == {}
    dag = bag.dags["eagle3_pipeline"]
    assert {f"C1_mine.{step}" for step in ("prepare", "generate", "validate")} <= set(dag.task_ids)
    assert "C1_mine.validate" in dag.get_task("merge").upstream_task_ids
    assert "start_server_generate" in dag.get_task("C1_mine.generate").upstream_task_ids
    form = dag.params.get_param("datasets")
    assert form.schema["items"]["enum"] == form.value == [*DATASET_KEYS, "C1_mine"]


def test_a_configuration_that_is_wrong_is_an_import_error_that_says_what(monkeypatch, tmp_path):
    configuration = tmp_path / "config.yaml"
    configuration.write_text("name: x\n")

    errors = bag_of(monkeypatch, configuration).import_errors

    assert len(errors) == len(list((PROJECT_ROOT / "dags").glob("*.py")))
    assert all(f"BadInput: {configuration}: " in error.splitlines()[-1] for error in errors.values())


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
    "wrong",
    [
        {"edition": "Main"},
        {"edition": "../main"},
        {"to": "deploy"},
        {"budget_tokens": -1},
        {"from": "publish", "to": "merge"},
    ],
)
def test_a_wrong_parameter_is_refused_by_name(wrong):
    with pytest.raises(BadInput, match=next(iter(wrong))):
        asked(wrong, run_type="manual")


def asked(conf: dict[str, object], *, run_type: str) -> RunParameters:
    """What the operators read from a run with this conf, on a form whose other fields are left as they are."""
    from aerie_airflow.form import form
    from aerie_airflow.operators import parameters_of

    left = {name: field.value for name, field in form(DATASET_KEYS).items()}
    return parameters_of({"params": {**left, **conf}, "dag_run": SimpleNamespace(run_type=run_type, conf=conf)})


def test_a_backfill_ends_with_validate_unless_it_says_otherwise():
    one = {"datasets": ["B3_magicoder"]}
    assert asked(one, run_type="backfill").last_step == "validate"
    assert asked({**one, "to": "merge"}, run_type="backfill").last_step == "merge"
    assert asked(one, run_type="manual").last_step == "publish"


def test_the_clock_never_starts_a_run_and_a_backfill_of_one_day_has_one_run(dag):
    serialised = DagSerialization.from_dict(DagSerialization.to_dict(dag))

    assert serialised.next_dagrun_info(last_automated_run_info=None) is None
    day = datetime(2026, 1, 5, tzinfo=UTC)
    assert [info.logical_date for info in serialised.iter_dagrun_infos_between(day, day)] == [day]
    assert len(list(serialised.iter_dagrun_infos_between(day, day + timedelta(days=2)))) == 3
    assert serialised.timetable.periodic
    assert serialised.timetable.summary == "On demand"


def test_what_a_host_without_the_database_does_is_recorded_by_the_control_side_before_it_is_used(monkeypatch, tmp_path):
    configuration = tmp_path / "config.yaml"
    demo = (PROJECT_ROOT / "demo" / "config.yaml").read_text()
    here = "{queue: gpu-1, remote: true}"
    places = f"placement: {{serve_start: {here}, serve_stop: {here}, capture: {here}, export: {here}}}"
    configuration.write_text(f"{demo}\n{places}\n")

    bag = bag_of(monkeypatch, configuration)

    assert bag.import_errors == {}
    dag = bag.dags["eagle3_pipeline"]
    recorders = {name for name in dag.task_ids if name.startswith("record_")}
    phases = ("generate", "capture", "benchmark")
    servers = {f"record_{what}_server_{phase}" for what in ("start", "stop") for phase in phases}
    assert recorders == {*servers, "record_capture", "record_export"}
    assert {dag.get_task(name).queue for name in recorders} == {"default"}
    assert dag.get_task("record_export").downstream_task_ids == {"benchmark", "close_run"}
    assert dag.get_task("record_capture").downstream_task_ids >= {"close_run"}


def test_without_such_a_host_nothing_is_recorded_apart(dag):
    assert not [name for name in dag.task_ids if name.startswith("record_")]
