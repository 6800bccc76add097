"""Links above a task's log."""

from types import SimpleNamespace

import pytest
from airflow.serialization.serialized_objects import DagSerialization
from fastapi import FastAPI
from fastapi.testclient import TestClient

from aerie.pipeline import RunParameters, stage_request
from aerie.settings.benchmark_target import BenchmarkTarget
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie_airflow.benchmarks import BenchmarkOperator
from aerie_airflow.operators import StageOperator
from aerie_dashboard.pages import response_log

SETTINGS = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
THEIRS = {"server_url": "http://10.0.0.5:8000"}
KEY = SimpleNamespace(
    run_id="manual__2026-11-29T17:40:41+00:00", dag_id="eagle3_pipeline", task_id="task", map_index=-1
)


@pytest.fixture
def links(monkeypatch, tmp_path):
    """Addresses of the links of a stage's task by name, once the stage was asked."""
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))

    def links(stage, *, dataset=None, asked=True, launch_token=None):
        operator = StageOperator(task_id="task", stage=stage, dataset=dataset)
        if asked:
            request = stage_request(SETTINGS, RunParameters(), run_id="run", dataset=dataset)
            operator._process = SimpleNamespace(request=request)
        operator._launch_token = launch_token
        return {link.name: link.get_link(operator, ti_key=KEY) for link in operator.operator_extra_links}

    return links


def test_a_data_sets_task_leads_to_its_run_its_data_set_and_its_samples(links):
    assert links("validate", dataset="B1_glaive") == {
        "Run in Aerie": "/aerie/runs/manual__2026-11-29T17%3A40%3A41%2B00%3A00",
        "Data set in Aerie": "/aerie/editions/main/datasets/B1_glaive",
        "Decoded samples": "/aerie/editions/main/datasets/B1_glaive/samples",
        "Response log": "/aerie/editions/main/datasets/B1_glaive/responses",
        "Server log": "",
    }


def test_a_task_that_used_a_server_leads_to_that_launchs_log(links):
    assert links("serve_start", launch_token="4f2a")["Server log"] == "/aerie/servers/4f2a/log"
    assert links("generate", dataset="B1_glaive")["Server log"] == "", "there is no server here"


@pytest.mark.parametrize(("measured", "link"), [({"drafter": "/d"}, "/aerie/servers/4f2a/log"), (THEIRS, "")])
def test_a_benchmark_of_any_drafter_leads_to_the_log_of_our_server_alone(monkeypatch, tmp_path, measured, link):
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    operator = BenchmarkOperator(task_id="measure", stage="benchmark_drafter")
    target = BenchmarkTarget(**measured, concurrency=(1,))
    request = stage_request(SETTINGS, RunParameters(), run_id="run").model_copy(update={"target": target})
    operator._process = SimpleNamespace(request=request)
    lease = SimpleNamespace(launch_token="4f2a")  # the run's own, or that of another one on this host
    monkeypatch.setattr("aerie.serving.lease.read_lease", lambda folder: lease)
    (server_log,) = operator.operator_extra_links
    assert server_log.get_link(operator, ti_key=KEY) == link


def test_a_task_that_did_nothing_leads_to_its_run_alone(links):
    assert {name for name, address in links("generate", dataset="B1_glaive", asked=False).items() if address} == {
        "Run in Aerie"
    }


def test_links_follow_airflow_below_another_path(links, monkeypatch):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://example.org/airflow/")
    assert links("validate", dataset="B1_glaive")["Data set in Aerie"].startswith("/airflow/aerie/editions/")


def test_the_web_server_knows_the_links_without_aeries_operators():
    from airflow.dag_processing.dagbag import DagBag

    dag = DagBag(str(PROJECT_ROOT / "dags")).dags["eagle3_pipeline"]
    task = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("B1_glaive.generate")
    assert set(task.extra_links) >= {
        "Run in Aerie", "Data set in Aerie", "Decoded samples", "Response log", "Server log",
    }  # fmt: skip


def test_the_response_logs_page_lists_its_files_and_leads_to_the_samples(monkeypatch, tmp_path):
    monkeypatch.setenv("AERIE_DATA_ROOT", str(tmp_path))
    folder = tmp_path / "editions" / "main" / "datasets" / "B1_glaive"
    folder.mkdir(parents=True)
    (folder / "responses.jsonl").write_bytes(b"x" * 12_345)
    app = FastAPI()
    app.include_router(response_log.router)
    client = TestClient(app)

    page = client.get("/editions/main/datasets/B1_glaive/responses").text
    assert "responses.jsonl" in page and "12,345" in page
    assert 'href="/editions/main/datasets/B1_glaive/samples"' in page
    assert "There is no response log here" in client.get("/editions/main/datasets/A1/responses").text
