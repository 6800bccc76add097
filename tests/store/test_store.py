"""The store against a real PostgreSQL."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg2
import pytest
from alembic import command

from aerie.artefacts.manifest import read_manifest, write_manifest
from aerie.artefacts.previews import Preview, write_previews
from aerie.artefacts.samples import VerdictRow, verdict_writer
from aerie.errors import Busy, Failed, Retryable
from aerie.pipeline import RunParameters, stage_request
from aerie.recording import record_event, record_result
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.stages import Events, StageResult
from aerie.store.connection import connect, connected, transaction
from aerie.store.migrate import migrate
from aerie.store.queries import alerts, drafters, leases, ledger, manifests, metrics, previews, runs

KEY = {"edition": "main", "dataset": "B1_glaive"}


@pytest.fixture
def connection(database_url):
    with connected(database_url) as opened:
        yield opened


def test_an_unreachable_database_is_worth_retrying_and_its_password_stays_secret():
    with pytest.raises(Retryable, match=r"127\.0\.0\.1:1/aerie") as caught:
        connect("postgresql://aerie:hush@127.0.0.1:1/aerie")
    assert "hush" not in str(caught.value)


def test_a_connection_that_breaks_in_a_transaction_is_worth_retrying(database_url):
    with connected(database_url) as ours, connected(database_url) as theirs:
        with transaction(theirs) as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", (ours.info.backend_pid,))
        with pytest.raises(Retryable, match="broke"):
            ledger.count_ledger(ours, **KEY)


def test_migrating_again_changes_nothing_and_two_at_once_take_turns(empty_database_url):
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(migrate, [empty_database_url] * 2))
    with connected(empty_database_url) as opened:
        runs.record_run(opened, run_id="r1", dag_id="d", edition="main", config={})
        migrate(empty_database_url)
        assert [run["run_id"] for run in runs.list_runs(opened)] == ["r1"]


def test_a_run_records_its_end_and_a_retry_of_its_start_reopens_it(connection):
    runs.record_run(connection, run_id="r1", dag_id="eagle3", edition="main", config={"datasets": ["B1_glaive"]})
    runs.finish_run(connection, run_id="r1", state="failed", summary={"why": "canary"})
    (run,) = runs.list_runs(connection)
    assert (run["state"], run["summary"]) == ("failed", {"why": "canary"}) and run["finished_at"] is not None
    runs.record_run(connection, run_id="r1", dag_id="eagle3", edition="main", config={})
    (run,) = runs.list_runs(connection)
    assert run["state"] == "running" and run["finished_at"] is None


def test_a_manifest_recorded_twice_is_one_row(connection, tmp_path: Path):
    written = write_manifest(
        tmp_path / "m.json", stage="merge", edition="main", dataset=None, fingerprint="f", inputs=(), outputs=(),
        counts={"rows": 3},
    )  # fmt: skip
    for run_id in ("r1", "r2"):
        manifests.record_manifest(connection, read_manifest(tmp_path / "m.json"), run_id)
    (row,) = manifests.latest_manifests(connection, edition="main")
    assert (row["run_id"], row["document"]["counts"]) == ("r1", {"rows": 3})
    assert row["finished_at"] == written.finished_at


ROWS = (
    ledger.LedgerRow(
        "a", "kept", 1, flags=("truncated",), prompt_tokens=10, completion_tokens=100, generated_tokens=100
    ),
    ledger.LedgerRow("b", "kept", 2, prompt_tokens=20, completion_tokens=50, generated_tokens=80),
    ledger.LedgerRow("c", "quarantined", 1, ("loop",), prompt_tokens=5, completion_tokens=7, generated_tokens=7),
    ledger.LedgerRow("d", "skipped", reasons=("held_out",), prompt_tokens=1),
    ledger.LedgerRow("e", "pending", prompt_tokens=1),
    ledger.LedgerRow("f", "failed", 4, ("http_500",), detail="the server said no", prompt_tokens=1),
)


def test_the_six_states_add_up_to_the_prompts_and_only_kept_tokens_count_as_kept(connection):
    ledger.write_rows(connection, **KEY, rows=ROWS)
    counts = ledger.count_ledger(connection, **KEY)
    states = counts.pending + counts.in_flight + counts.kept + counts.quarantined + counts.skipped + counts.failed
    assert states == counts.prompts == 6
    assert (counts.kept_response_tokens, counts.kept_prompt_tokens, counts.generated_tokens) == (150, 30, 187)
    assert counts.flagged == 1
    assert ledger.count_editions(connection) == {("main", "B1_glaive"): counts}
    assert ledger.count_editions(connection, edition="other") == {}
    assert ledger.count_reasons(connection, **KEY)["quarantined"] == {"loop": 1}


def test_samples_of_a_validation_that_fails_are_there_to_be_seen(connection, tmp_path: Path):
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    request = stage_request(settings, RunParameters(), run_id="r", dataset="B1_glaive", stage="validate")
    request = request.model_copy(update={"data_root": tmp_path})
    files = request.files.dataset("B1_glaive")
    files.folder.mkdir(parents=True)
    with verdict_writer(files.verdicts) as writer:
        writer.write(verdict("a", "quarantined", reasons=("loop",)))
    fields = {"conversation_id": "c", "split": "train", "flags": (), "positions": {}, "spans": [("prompt", "hello")]}
    lengths = {"prompt_tokens": 10, "response_tokens": 100, "reasoning_tokens": 3}
    preview = Preview(sample_id="a", verdict="quarantined", reasons=("loop",), **fields, **lengths)
    write_previews(files.previews, [preview])
    Events(tmp_path / "events.jsonl").judged()
    record_event(connection, "validate", request, json.loads((tmp_path / "events.jsonl").read_text()))
    (shown,) = previews.list_previews(connection, **KEY)
    assert (shown["sample_id"], shown["state"], shown["reasons"]) == ("a", "quarantined", ["loop"])


def test_totals_follow_whatever_changes_the_rows(connection):
    ledger.write_rows(connection, **KEY, rows=ROWS)
    changed = [
        replace(ROWS[0], state="quarantined", reasons=("loop", "no_close"), flags=(), completion_tokens=90),
        replace(ROWS[4], state="in_flight"), ledger.LedgerRow("g", "kept", 1, completion_tokens=5),
    ]  # fmt: skip
    ledger.write_rows(connection, **KEY, rows=changed)
    ledger.load_verdicts(connection, **KEY, verdicts=[verdict("c", "kept", flags=("truncated",))])
    ledger.delete_rows(connection, **KEY, sample_ids=["b", "d"])
    counts = ledger.count_ledger(connection, **KEY)
    assert (counts.prompts, counts.kept, counts.quarantined, counts.in_flight, counts.failed) == (5, 2, 1, 1, 1)
    assert (counts.pending, counts.skipped, counts.flagged) == (0, 0, 1)
    assert (counts.kept_response_tokens, counts.judged_tokens, counts.generated_tokens) == (105, 195, 107)
    assert ledger.count_reasons(connection, **KEY) == {
        "failed": {"http_500": 1}, "flags": {"truncated": 1}, "quarantined": {"loop": 1, "no_close": 1},
    }  # fmt: skip
    ledger.delete_rows(connection, **KEY, sample_ids=list("acefg"))
    assert ledger.count_editions(connection) == {} and ledger.count_reasons(connection, **KEY) == {}


def test_a_store_that_is_older_than_the_totals_has_its_rows_added_up(empty_database_url, monkeypatch):
    upgrade = command.upgrade
    monkeypatch.setattr(command, "upgrade", lambda config, revision: upgrade(config, "0007"))
    migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        ledger.write_rows(connection, **KEY, rows=ROWS)
    monkeypatch.undo()
    migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        counts = ledger.count_ledger(connection, **KEY)
    assert (counts.prompts, counts.kept_response_tokens, counts.flagged) == (6, 150, 1)


def test_drafters_are_read_page_by_page_the_newest_first(connection):
    for number in range(5):
        drafters.record_drafter(connection, drafter_id=f"d{number}", edition="main", uri="", state="exported")
    pages = [drafters.page_of_drafters(connection, number=number, rows=2) for number in (1, 2, 3, 4)]
    read = [([row["drafter_id"] for row in rows], more) for rows, more in pages]
    assert read == [(["d4", "d3"], True), (["d2", "d1"], True), (["d0"], False), ([], False)]


def test_a_row_reads_back_as_it_was_written(connection):
    ledger.write_rows(connection, **KEY, rows=ROWS)
    assert ledger.read_ledger(connection, **KEY) == {row.sample_id: row for row in ROWS}
    changed = replace(ROWS[4], state="in_flight", attempts=1)
    ledger.write_rows(connection, **KEY, rows=[changed])
    assert ledger.read_ledger(connection, **KEY)["e"] == changed


def verdict(sample_id: str, verdict: str, reasons: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> VerdictRow:
    return VerdictRow(
        sample_id=sample_id, verdict=verdict, reasons=reasons, flags=flags, positions={}, prompt_tokens=10,
        completion_tokens=100, reasoning_tokens=3, answer_tokens=90, tool_calls=0,
    )  # fmt: skip


def test_verdicts_of_validate_move_rows_and_add_imported_ones(connection):
    ledger.write_rows(connection, **KEY, rows=ROWS)
    given = [verdict("a", "quarantined", ("policy:truncated",)), verdict("new", "kept", flags=("odd",))]
    assert ledger.load_verdicts(connection, **KEY, verdicts=given) == 2
    rows = ledger.read_ledger(connection, **KEY)
    assert (rows["a"].state, rows["a"].reasons, rows["a"].judged_by) == (
        "quarantined",
        ("policy:truncated",),
        "validate",
    )
    assert rows["a"].generated_tokens == 100
    assert (rows["new"].state, rows["new"].flags) == ("kept", ("odd",))
    with pytest.raises(Failed, match="'maybe'"):
        ledger.load_verdicts(connection, **KEY, verdicts=[verdict("b", "kept"), verdict("c", "maybe")])
    assert ledger.read_ledger(connection, **KEY)["b"].judged_by is None, "a refused load must leave nothing behind"


HOLD = """
import sys
from aerie.store.connection import connect
from aerie.store.queries.ledger import only_writer
connection = connect(sys.argv[1])
with only_writer(connection, edition="main", dataset="B1_glaive", run_id="the first run"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_refused_by_name_until_the_first_is_gone_even_by_sigkill(connection, database_url):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, database_url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "include"},
    )  # fmt: skip
    try:
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(Busy, match=rf"run the first run \(process {first.pid} on "),
            ledger.only_writer(connection, **KEY, run_id="the second run"),
        ):
            pytest.fail("two writers at once")
        with ledger.only_writer(connection, edition="main", dataset="B2_opencodeinstruct", run_id="r"):
            pass
    finally:
        first.kill()
        first.wait()
        first.stdin.close()
        first.stdout.close()
    _wait_until_backend_gone(connection)
    with ledger.only_writer(connection, **KEY, run_id="the second run"):
        pass


def _wait_until_backend_gone(connection: psycopg2.extensions.connection) -> None:
    """PostgreSQL notices a dead client when it next reads from it."""
    for _ in range(1000):
        with transaction(connection) as cursor:
            cursor.execute(
                "SELECT count(*), pg_sleep(0.01) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
                "pg_backend_pid() AND backend_type = 'client backend'"
            )
            if cursor.fetchone()[0] == 0:
                return
    pytest.fail("the dead process's connection is still there")


def test_editions_keep_settings_beside_fingerprints_and_say_why_they_stopped(connection):
    settings = {
        "generation_fingerprint": "g", "generation_settings": {"seed": 1},
        "rules_fingerprint": "r", "rules_settings": {"version": 3},
    }  # fmt: skip
    runs.record_edition(connection, **KEY, **settings)
    runs.record_stop(connection, **KEY, stopped_by="budget", message="12 of 10 tokens")
    assert runs.read_edition(connection, **KEY)["stopped_by"] == "budget"
    runs.record_edition(connection, **KEY, **settings)
    row = runs.read_edition(connection, **KEY)
    assert row["stopped_by"] is None and row["generation_settings"] == {"seed": 1}
    assert runs.read_edition(connection, edition="main", dataset="B9") is None


def test_metrics_alerts_leases_drafters_and_previews_read_back(connection):
    at = datetime(2026, 1, 2, tzinfo=UTC)
    row = metrics.MetricRow(at, "r1", "main", "B1_glaive", "generate", {"tokens": 5, "rate": 0.5, "none": None})
    metrics.record_metrics(connection, [row])
    metrics.record_metrics(connection, [])
    (read,) = metrics.read_metrics(connection, edition="main", stage="generate", since=at)
    assert (read["at"], read["figures"]) == (at, dict(row.figures))
    assert metrics.read_metrics(connection, edition="main", stage="generate", dataset="B2") == []

    alerts.record_alert(connection, reason="canary", message="too few tool calls", edition="main")
    assert alerts.list_alerts(connection, edition="main")[0]["message"] == "too few tool calls"

    lease = {"launch_token": "t", "log_path": "/data/server/logs/t.log"}
    leases.record_lease(connection, {**lease, "port": 1})
    leases.record_lease(connection, {**lease, "port": 2})
    leases.mark_leases_ended(connection, Path("/data/serv"), reason="not its folder")
    leases.mark_leases_ended(connection, Path("/data/server"), reason="stopped")
    leases.mark_leases_ended(connection, Path("/data/server"), reason="reaped")
    (read,) = leases.list_leases(connection)
    assert (read["document"]["port"], read["end_reason"]) == (2, "stopped")
    assert leases.list_leases(connection, open_only=True) == []

    known = {"drafter_id": "d1", "edition": "main", "uri": "file:///d1"}
    drafters.record_drafter(connection, **known, state="trained", training={"loss": 1.5})
    drafters.record_drafter(connection, **known, state="measured", benchmark={"acceptance_length": 2.5})
    (drafter,) = drafters.list_drafters(connection, edition="main")
    assert drafter["training"] == {"loss": 1.5} and drafter["benchmark"] == {"acceptance_length": 2.5}

    ledger.write_rows(connection, **KEY, rows=ROWS)
    for sample_id, text in (("z", "old"), ("a", "hello")):
        document = {"sample_id": sample_id, "text": text}
        assert previews.load_previews(connection, **KEY, source="validate", previews=[document]) == 1
    (preview,) = previews.list_previews(connection, **KEY)
    assert (preview["document"]["text"], preview["flags"]) == ("hello", ["truncated"])


def test_a_run_finds_its_own_alerts_and_servers_among_any_number_of_others(connection):
    alerts.record_alert(connection, run_id="pilot", reason="run_failed", message="it never opened")  # no edition
    lease = {"log_path": "/data/server/logs/t.log"}
    shared = {"launch_token": "of two", "holders": [{"owner": "o"}, {"owner": "pilot"}]}
    leases.record_lease(connection, {**lease, **shared})
    leases.record_lease(connection, {**lease, "launch_token": "of before there were holders", "owner": "pilot"})
    for number in range(30):
        alerts.record_alert(connection, run_id="pilot-2", reason="canary", message="other", edition="main")
        other = {"launch_token": f"other {number}", "holders": [{"owner": "pilot-2"}]}
        leases.record_lease(connection, {**lease, **other})
    assert [row["message"] for row in alerts.list_alerts(connection, run_id="pilot", limit=20)] == ["it never opened"]
    assert [alerts.count_alerts(connection, run_id=run_id) for run_id in ("pilot", "pilot-2")] == [1, 30]
    held = {row["launch_token"] for row in leases.list_leases(connection, held_by="pilot")}
    assert held == {"of two", "of before there were holders"}


def test_a_server_that_was_restarted_or_found_gone_does_not_stay_in_the_store_as_running(connection, tmp_path):
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    request = stage_request(settings, RunParameters(), run_id="r", dataset="B1_glaive", stage="generate")
    events = Events(tmp_path / "events.jsonl")
    for token, started_at in (("first", 1.5), ("second", 2.5), ("first", 1.5)):  # a far host's are recorded late
        log = f"{request.server_folder}/logs/{token}.log"
        events.lease({"launch_token": token, "log_path": log, "started_at": started_at})
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        record_event(connection, "generate", request, json.loads(line))
    (held,) = leases.list_leases(connection, open_only=True)
    assert held["launch_token"] == "second"
    reasons = {lease["launch_token"]: lease["end_reason"] for lease in leases.list_leases(connection)}
    assert reasons == {"first": "followed by second", "second": None}
    stopped = StageResult(stage="serve_stop", reused=True, data={"ended": "found gone by its run"})
    record_result(connection, request, stopped)
    assert leases.list_leases(connection, open_only=True) == []


def test_previews_of_the_canary_and_of_validate_do_not_wipe_each_other_and_validate_has_the_last_word(connection):
    def load(source, **texts):
        documents = [{"sample_id": name, "text": text} for name, text in texts.items()]
        previews.load_previews(connection, **KEY, source=source, previews=documents)

    def shown():
        return {row["sample_id"]: row["document"]["text"] for row in previews.list_previews(connection, **KEY)}

    load("canary", a="canary", b="canary")
    load("validate", b="validate", c="validate")
    assert shown() == {"a": "canary", "b": "validate", "c": "validate"}
    load("canary", c="canary again", d="canary again")
    assert shown() == {"b": "validate", "c": "validate", "d": "canary again"}


def test_an_alert_is_acknowledged_once_and_by_the_first(connection):
    alerts.record_alert(connection, reason="canary", message="too few tool calls")
    (alert,) = alerts.list_alerts(connection)
    assert alerts.acknowledge_alert(connection, alert_id=alert["id"], user="ada")
    assert alerts.acknowledge_alert(connection, alert_id=alert["id"], user="bob")
    (seen,) = alerts.list_alerts(connection)
    assert seen["acknowledged_by"] == "ada" and seen["acknowledged_at"] is not None
    assert not alerts.acknowledge_alert(connection, alert_id=alert["id"] + 1, user="ada")


def test_a_series_is_thinned_evenly_over_its_time_and_keeps_its_ends(connection):
    start = datetime(2026, 1, 2, tzinfo=UTC)
    rows = [
        metrics.MetricRow(start + timedelta(seconds=number), "r1", "main", dataset, "generate", {"number": number})
        for number in range(1000)
        for dataset in ("B1_glaive", None)
    ]
    metrics.record_metrics(connection, rows)
    for dataset in ("B1_glaive", None):
        thinned = metrics.sample_metrics(connection, edition="main", stage="generate", dataset=dataset, points=10)
        assert [row["figures"]["number"] for row in thinned] == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
        assert {row["dataset"] for row in thinned} == {dataset}
    few = metrics.sample_metrics(connection, edition="main", stage="generate", dataset="B1_glaive", points=5000)
    assert len(few) == 1000
    assert metrics.sample_metrics(connection, edition="other", stage="generate") == []
