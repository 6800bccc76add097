"""What a task tells of its asset: nothing but what has an answer."""

from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowSkipException
from airflow.sdk.execution_time.context import OutletEventAccessors

from aerie.artefacts.manifest import write_manifest
from aerie.asset_facts import asset_facts
from aerie.pipeline import RunParameters, stage_request
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.stage_process import StageProcess
from aerie.stages import StageResult
from aerie_airflow.assets import CORPUS, DRAFTER, validated
from aerie_airflow.operators import StageOperator

SETTINGS = load_settings(PROJECT_ROOT / "demo" / "config.yaml")


def result_of(path, stage, *, dataset=None, reused=False, **data):
    manifest = write_manifest(
        path, stage=stage, edition="main", dataset=dataset, fingerprint="f" * 64, inputs=[], outputs=[],
        counts={"rows": 511},
    )  # fmt: skip
    return StageResult(stage=stage, reused=reused, manifest=manifest, data=data)


@pytest.fixture
def merge(monkeypatch, tmp_path, database_url):
    """Runs the operator of ``merge``, whose stage has this answer; gives what it tells of the corpus, or None."""
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    monkeypatch.setenv("AERIE_DATA_ROOT", str(tmp_path / "data"))
    events = OutletEventAccessors()

    def execute(*, reused=False, **params):
        result = result_of(tmp_path / "merge.json", "merge", reused=reused)
        monkeypatch.setattr(StageProcess, "run", lambda self: result)
        operator = StageOperator(task_id="merge", stage="merge", outlets=[CORPUS])
        instance = SimpleNamespace(run_id="run 1", task_id="merge", dag_id="dag", try_number=1)
        run = SimpleNamespace(run_type="manual", conf={}, start_date=None)
        operator.execute({"params": params, "ti": instance, "dag_run": run, "outlet_events": events})
        return events[CORPUS].extra if operator.outlets else None

    return execute


@pytest.mark.parametrize("reused", [False, True])
def test_an_answer_is_told_with_its_edition_place_fingerprint_and_counts_also_where_it_was_there(
    merge, tmp_path, reused
):
    told = merge(reused=reused, edition="main")
    assert told.pop("finished_at")
    assert told == {
        "edition": "main",
        "run_id": "run 1",
        "fingerprint": "f" * 64,
        "reused": reused,
        "counts": {"rows": 511},
        "uri": (tmp_path / "data" / "editions" / "main" / "corpus").as_uri(),
    }


def test_a_task_before_the_runs_first_step_tells_nothing(merge):
    assert merge(**{"from": "train"}) is None


def test_a_task_that_is_no_part_of_the_run_is_skipped_and_so_tells_nothing(merge):
    with pytest.raises(AirflowSkipException):
        merge(to="validate")


def test_each_asset_says_what_its_consumers_look_for(tmp_path):
    def facts(stage, dataset=None, **data):
        request = stage_request(SETTINGS, RunParameters(), run_id="run 1", dataset=dataset)
        return asset_facts(request, result_of(tmp_path / "manifest.json", stage, dataset=dataset, **data))

    samples = facts("validate", "B1_glaive")
    assert (samples["dataset"], samples["uri"].rpartition("/")[2]) == ("B1_glaive", "samples.parquet")
    drafter = facts("publish", drafter_fingerprint="abcdef012345678", uri="file:///published/main-abcdef012345")
    assert (drafter["drafter_id"], drafter["uri"]) == ("main-abcdef012345", "file:///published/main-abcdef012345")


def test_the_pipeline_has_the_assets_that_its_documents_name(dag_of_the_pipeline):
    outlets = {
        task.task_id: [(asset.name, asset.uri) for asset in task.outlets]
        for task in dag_of_the_pipeline.tasks
        if task.outlets
    }
    expected = {
        f"{key}.validate": [(f"aerie_validated_{key}", f"aerie://validated/{key}")] for key in SETTINGS.datasets
    }
    assert outlets == {
        **expected,
        "merge": [("aerie_corpus", "aerie://corpus/")],
        "publish": [("aerie_drafter", "aerie://drafter/")],
    }
    assert {validated("A1").name, DRAFTER.name} == {"aerie_validated_A1", "aerie_drafter"}


@pytest.fixture
def dag_of_the_pipeline():
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(str(PROJECT_ROOT / "dags")).dags["eagle3_pipeline"]
