"""The history of benchmarks and decisions in a real PostgreSQL."""

from datetime import UTC, datetime, timedelta

import pytest
from alembic import command

from aerie.artefacts.manifest import write_manifest
from aerie.benchmark.production import drafter_in_production, published_drafters
from aerie.pipeline import RunParameters, stage_request
from aerie.recording import record_event, record_result
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.stages import StageResult
from aerie.store import migrate
from aerie.store.connection import connected, transaction
from aerie.store.queries.benchmarks import list_benchmarks, record_benchmark
from aerie.store.queries.decisions import list_decisions, record_decision
from aerie.store.queries.drafters import list_drafters, list_published, record_drafter
from aerie.store.queries.manifests import record_manifest

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)
DRAFTER = "main-abcdef012345"


@pytest.fixture
def connection(database_url):
    with connected(database_url) as opened:
        yield opened


def measured(path, *, length, fingerprint="measured"):
    counts = {
        "drafter_fingerprint": "abcdef0123456789", "acceptance_length": length, "settings": {"concurrency": 8},
        "by_concurrency": [
            {"concurrency": 8, "acceptance_length": length}, {"concurrency": 1, "acceptance_length": length - 1},
        ],
    }  # fmt: skip
    return write_manifest(
        path, stage="benchmark", edition="main", dataset=None, fingerprint=fingerprint, inputs=[], outputs=[],
        counts=counts,
    )  # fmt: skip


def test_a_drafters_earlier_benchmarks_stay_when_it_is_measured_again(connection, tmp_path):
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    request = stage_request(settings, RunParameters(), run_id="run 1")
    for length in (2.5, 2.7):
        manifest = measured(tmp_path / "m.json", length=length)
        result = StageResult(
            stage="benchmark", reused=False, manifest=manifest, data={"drafter_fingerprint": "abcdef0123456789"}
        )
        for _ in range(2):  # a task that finds it answered hands it on again
            record_result(connection, request, result)
    rows = list_benchmarks(connection, drafter_id=DRAFTER)
    found = sorted((row["concurrency"], row["document"]["acceptance_length"]) for row in rows)
    assert found == [(1, 1.5), (1, pytest.approx(1.7)), (8, 2.5), (8, 2.7)], "one row for each concurrency"
    assert {row["document"]["settings"]["concurrency"] for row in rows} == {1, 8}
    (drafter,) = list_drafters(connection)
    assert drafter["benchmark"]["acceptance_length"] == 2.7


def test_a_measurement_of_a_drafter_that_is_not_registered_is_kept_too(connection):
    record_benchmark(
        connection, measured_at=NOON, run_id="run 1", edition="main", drafter_id=None, fingerprint="f", concurrency=1,
        document={"acceptance_length": 2.0},
    )  # fmt: skip
    assert len(list_benchmarks(connection)) == 1
    assert list_benchmarks(connection, drafter_id=DRAFTER) == []


def test_benchmarks_of_before_are_taken_over_from_the_manifests(empty_database_url, monkeypatch, tmp_path):
    upgrade = command.upgrade
    monkeypatch.setattr(command, "upgrade", lambda config, revision: upgrade(config, "0002"))
    migrate.migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        record_manifest(connection, measured(tmp_path / "m.json", length=2.5), "run 1")
    monkeypatch.undo()
    migrate.migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        (row,) = list_benchmarks(connection, drafter_id=DRAFTER)
    assert (row["run_id"], row["concurrency"], row["document"]["acceptance_length"]) == ("run 1", 8, 2.5)


def test_the_latest_decision_of_each_task_holds(connection):
    def decide(task_id, approved, minutes):
        for _ in range(2):  # a task that is tried again hands it on again
            record_decision(
                connection, run_id="run 1", edition="main", task_id=task_id, subject="Publish?", body="| table |",
                approved=approved, decided_by="ada", decided_at=NOON + timedelta(minutes=minutes),
            )  # fmt: skip

    decide("approve_publish", approved=False, minutes=0)
    decide("approve_capture", approved=True, minutes=1)
    decide("approve_publish", approved=True, minutes=2)
    assert [(row["task_id"], row["approved"]) for row in list_decisions(connection, run_id="run 1")] == [
        ("approve_capture", True),
        ("approve_publish", True),
    ]
    assert list_decisions(connection, run_id="run 2") == []


def test_a_stage_that_is_run_again_takes_a_published_drafter_nothing_back(connection, tmp_path):
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    request = stage_request(settings, RunParameters(), run_id="run 1")
    data = {"drafter_fingerprint": "abcdef0123456789"}
    measurement = StageResult(
        stage="benchmark", reused=True, manifest=measured(tmp_path / "m.json", length=2.5), data=data
    )
    published = measurement.model_copy(update={"stage": "publish", "data": {**data, "uri": "file:///published/it"}})
    seen = []
    for result in (measurement, published, measurement):
        record_result(connection, request, result)
        (row,) = list_drafters(connection)
        seen.append((row["state"], row["uri"]))
    assert seen == [
        ("accepted", request.files.drafter.as_uri()),
        ("published", "file:///published/it"),
        ("published", "file:///published/it"),
    ]


def rejection(at, *, length=1.3):
    row = {"concurrency": 8, "acceptance_length": length}
    counts = {
        "drafter_fingerprint": "abcdef0123456789", "acceptance_length": length, "settings": {"concurrency": 8},
        "by_concurrency": [row], "gates": [{"gate": "threshold", "verdict": "failed", "said": "too low"}],
    }  # fmt: skip
    return {"type": "rejected", "time": at.timestamp(), "fingerprint": "measured", "counts": counts}


def test_a_drafter_that_failed_its_gates_is_kept_with_their_verdict_until_a_later_benchmark_passes(
    connection, tmp_path
):
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    request = stage_request(settings, RunParameters(), run_id="run 1")
    record_event(connection, "benchmark", request, rejection(NOON))
    (drafter,) = list_drafters(connection)
    assert (drafter["drafter_id"], drafter["state"]) == (DRAFTER, "rejected")
    assert drafter["benchmark"]["gates"][0]["verdict"] == "failed"
    (row,) = list_benchmarks(connection, run_id="run 1")
    assert (row["concurrency"], row["document"]["acceptance_length"], row["measured_at"]) == (8, 1.3, NOON)
    assert list_benchmarks(connection, run_id="run 2") == []
    manifest = measured(tmp_path / "m.json", length=2.5)
    data = {"drafter_fingerprint": "abcdef0123456789"}
    passed = StageResult(stage="benchmark", reused=False, manifest=manifest, data=data)
    record_result(connection, request, passed)
    assert list_drafters(connection)[0]["state"] == "accepted"
    record_event(connection, "benchmark", request, rejection(NOON + timedelta(hours=1)))
    assert list_drafters(connection)[0]["state"] == "rejected", "the latest judgement holds"
    published = passed.model_copy(update={"stage": "publish", "data": {**data, "uri": "file:///published/it"}})
    record_result(connection, request, published)
    record_event(connection, "benchmark", request, rejection(NOON + timedelta(hours=2)))
    (drafter,) = list_drafters(connection)
    assert (drafter["state"], drafter["uri"]) == ("published", "file:///published/it")


def recorded(connection, tmp_path, edition, stage, *, manifest=None, length=3.0):
    """One stage of an edition's drafter, recorded as its task does; a manifest that is given was reused."""
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    request = stage_request(settings, RunParameters(edition=edition), run_id="run 1")
    fingerprint = f"{edition}-of-twelve-and-more"
    counts = {
        "drafter_fingerprint": fingerprint, "verifier": "v", "measured_as": "prompts", "acceptance_length": length,
        "settings": {"concurrency": 8}, "by_concurrency": [],
    }  # fmt: skip
    manifest = manifest or write_manifest(
        tmp_path / "m.json", stage=stage, edition=edition, dataset=None,
        fingerprint=fingerprint if stage == "export" else stage, inputs=[], outputs=[], counts=counts,
    )  # fmt: skip
    data = {"drafter_fingerprint": fingerprint}
    if stage == "publish":
        data["uri"] = f"file:///published/{edition}"
    record_result(connection, request, StageResult(stage=stage, reused=True, manifest=manifest, data=data))
    return manifest


def in_production(tmp_path):
    found = drafter_in_production(
        published_drafters(), verifier="v", drafter_fingerprint="c", measured_as="prompts", published=tmp_path
    )
    return found.drafter_id, found.acceptance_length


@pytest.mark.parametrize("again", ["export", "benchmark", "publish"])
def test_the_drafter_in_production_is_the_one_published_last_whatever_is_recorded_of_an_older_one_after(
    connection, database_url, monkeypatch, tmp_path, again
):
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    first = {}
    for edition, length in (("a", 3.0), ("b", 3.2)):
        for stage in ("export", "benchmark", "publish"):
            manifest = recorded(connection, tmp_path, edition, stage, length=length)
            first.setdefault(stage, manifest)
    recorded(connection, tmp_path, "a", again, manifest=first[again])
    recorded(connection, tmp_path, "c", "benchmark", length=3.4)
    assert in_production(tmp_path) == ("b-b-of-twelve-", 3.2)


def test_a_drafter_that_is_published_again_is_in_production_again(connection, database_url, monkeypatch, tmp_path):
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    for edition, length in (("a", 3.0), ("b", 3.2)):
        for stage in ("benchmark", "publish"):
            recorded(connection, tmp_path, edition, stage, length=length)
    recorded(connection, tmp_path, "a", "publish")
    assert in_production(tmp_path) == ("a-a-of-twelve-", 3.0)


def test_drafters_of_a_store_without_times_of_publication_have_them_from_their_manifests(
    empty_database_url, monkeypatch, tmp_path
):
    upgrade = command.upgrade
    monkeypatch.setattr(command, "upgrade", lambda config, revision: upgrade(config, "0008"))
    migrate.migrate(empty_database_url)
    monkeypatch.setattr(command, "upgrade", upgrade)
    with connected(empty_database_url) as connection:
        with transaction(connection) as cursor:
            states = {"b-b-of-twelve-": "published", "a-a-of-twelve-": "published", "d": "published", "c": "accepted"}
            for drafter, state in states.items():
                cursor.execute(
                    "INSERT INTO drafters (drafter_id, edition, uri, state, updated_at) VALUES (%s, %s, '', %s, now())",
                    (drafter, drafter[0], state),
                )
        for edition in "ab":
            manifest = write_manifest(
                tmp_path / "m.json", stage="publish", edition=edition, dataset=None, fingerprint="f", inputs=[],
                outputs=[], counts={"drafter_fingerprint": f"{edition}-of-twelve-and-more"},
            )  # fmt: skip
            record_manifest(connection, manifest, "run 1")
    migrate.migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        record_drafter(connection, drafter_id="c", edition="c", uri="", state="accepted")
        rows = {row["drafter_id"]: row for row in list_drafters(connection)}
        assert [row["edition"] for row in list_published(connection)] == ["b", "a", "d"]
    assert rows["c"]["published_at"] is None
    assert rows["b-b-of-twelve-"]["published_at"] == manifest.finished_at
    assert rows["d"]["published_at"] == rows["d"]["updated_at"], "all that is known of it"
