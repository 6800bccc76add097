"""The second DAG: what starts it, what its form takes, and what its tasks ask for."""

from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowSkipException
from airflow.sdk.execution_time.context import TriggeringAssetEventsAccessor

from aerie.settings.machine import PROJECT_ROOT
from aerie.stage_process import StageProcess
from aerie.stages import StageResult
from aerie.store.connection import connected
from aerie.store.queries.drafters import record_drafter
from aerie_airflow.assets import DRAFTER

PUBLISHED = "main-abcdef012345"


@pytest.fixture(scope="module")
def dag():
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(PROJECT_ROOT / "dags"))
    assert bag.import_errors == {}
    return bag.dags["eagle3_benchmark"]


def test_it_waits_for_a_published_drafter_and_starts_no_server_unasked(dag):
    assert [asset.name for asset in dag.timetable.asset_condition.objects] == [DRAFTER.name]
    assert dag.is_paused_upon_creation is True


def test_its_server_is_ended_whatever_became_of_the_measurement(dag):
    assert dag.get_task("stop_server").is_teardown
    assert dag.get_task("stop_server").upstream_task_ids == {"measure"}
    assert dag.get_task("measure").pool == "aerie_server"


def test_every_field_of_its_form_explains_itself_and_can_be_left_as_it_is(dag):
    dag.params.validate()
    for name in dag.params:
        described = dag.params.get_param(name)
        assert described.schema["title"] and described.description, name


@pytest.fixture
def requested(dag, monkeypatch, tmp_path, database_url):
    """Runs a task with a registered and published drafter, and gives what its stage is asked."""
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    monkeypatch.setenv("AERIE_DATA_ROOT", str(tmp_path / "data"))
    folder = tmp_path / "data" / "mine"
    folder.mkdir(parents=True)
    requests = []
    monkeypatch.setattr(
        StageProcess, "run",
        lambda process: requests.append(process.request) or StageResult(stage=process.stage, reused=True),
    )  # fmt: skip

    def run(task_id, *events, **params):
        with connected(database_url) as connection:
            record_drafter(connection, drafter_id=PUBLISHED, edition="main", uri=folder.as_uri(), state="published")
        given = {name: dag.params.get_param(name).value for name in dag.params} | params
        told = [SimpleNamespace(asset=DRAFTER, source_aliases=[], extra=extra) for extra in events]
        task = dag.get_task(task_id)
        task.execute({
            "params": given, "triggering_asset_events": TriggeringAssetEventsAccessor.build(told),
            "ti": SimpleNamespace(run_id="run 1", task_id=task_id, dag_id=dag.dag_id, try_number=1),
            "dag_run": SimpleNamespace(run_type="manual", conf={}, start_date=None),
        })  # fmt: skip
        return requests[-1]

    run.folder = folder
    return run


def test_a_drafter_is_measured_by_hand_at_the_concurrencies_that_are_asked_for(requested):
    request = requested("measure", drafter=str(requested.folder), concurrency=[1, 16])
    assert (request.target.drafter, request.target.concurrency) == (requested.folder.resolve(), (1, 16))


def test_the_asset_names_the_drafter_that_is_measured(requested, monkeypatch):
    from aerie import drafter_benchmarks

    monkeypatch.setattr(drafter_benchmarks, "_registered", lambda *_: requested.folder)
    event = {"drafter_id": PUBLISHED, "edition": "main", "finished_at": "2026-12-01T12:00:00+00:00"}
    request = requested("measure", event)
    assert (request.target.drafter_id, request.edition) == (PUBLISHED, "main")


def test_our_server_is_stopped_and_someone_elses_is_left_running(requested):
    assert requested("stop_server", drafter="no-such-drafter").phase == "benchmark"
    with pytest.raises(AirflowSkipException, match="left running"):
        requested("stop_server", server_url="http://10.0.0.5:8000")
