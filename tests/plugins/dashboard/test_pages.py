"""What pages say of a filled store, of documents that lack something, and of a store that is away."""

import re
from pathlib import Path

import pytest

from aerie.store.connection import connected, transaction
from aerie.store.queries.alerts import record_alert
from aerie.store.queries.leases import record_lease
from aerie.store.queries.runs import finish_run, record_run

from ...dashboard import EDITION, LAUNCH, LIVE_RUN, RUN, SCRIPT, lease


def text_of(dashboard, path, status=200):
    with dashboard.client("viewer") as client:
        answer = client.get(f"/aerie{path}")
    assert answer.status_code == status, answer.text
    return answer.text


def words_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_overview_lists_runs_with_their_figures(dashboard):
    page = words_of(text_of(dashboard, "/"))
    assert RUN in page and "1,881,000" in page and "2.69" in page and "quarantine rate" in page


def test_a_run_that_is_running_shows_where_it_is_and_refreshes_itself(dashboard):
    path = f"/runs/{LIVE_RUN.replace('/', '%2F')}"
    page = text_of(dashboard, path)
    assert "data-refresh=" in page
    words = words_of(page)
    assert "71.0%" in words and "24 " in words and "98.5%" in words
    assert re.search(r"GPU utilisation not known", words)
    assert "159,000" in words and "160,177" in words
    live = text_of(dashboard, f"{path}?part=live")
    assert live.lstrip().startswith('<div id="live"') and "<html" not in live


def test_a_run_that_has_ended_does_not_refresh_itself(dashboard):
    assert "data-refresh" not in text_of(dashboard, f"/runs/{RUN}")


def test_an_alert_leads_to_its_tasks_log(dashboard):
    page = text_of(dashboard, f"/runs/{LIVE_RUN.replace('/', '%2F')}")
    assert "tasks/B8_sweagent.generate" in page


@pytest.mark.parametrize(
    "path", ["/", f"/runs/{LIVE_RUN.replace('/', '%2F')}", f"/servers/{LAUNCH}/log", "/servers", "/card"]
)
def test_markup_in_the_store_stays_text(dashboard, path):
    page = text_of(dashboard, path)
    assert SCRIPT not in page


def test_a_servers_log_is_shown_as_text(dashboard):
    assert "&lt;script&gt;" in text_of(dashboard, f"/servers/{LAUNCH}/log")


def test_a_servers_log_is_shown_without_its_secrets(dashboard):
    page = text_of(dashboard, f"/servers/{LAUNCH}/log")
    assert "hush-hush" not in page and "http://***@hub/?token=***" in page


def test_a_file_outside_the_servers_folder_is_never_shown(dashboard):
    assert "not on this host" in text_of(dashboard, "/servers/launch-elsewhere/log")


def test_servers_show_plan_leases_and_launches(dashboard):
    words = words_of(text_of(dashboard, "/servers"))
    assert "95.59 GiB" in words and "162,877" in words and LAUNCH in words and "8.50 GiB" in words


@pytest.mark.parametrize(
    ("task", "target"),
    [
        ("B1_glaive.generate", f"/aerie/editions/{EDITION}/datasets/B1_glaive"),
        ("start_server_capture", "/aerie/servers"),
        ("merge", "/aerie/runs/manual__2026-11-29T17%3A45%3A12%2B00%3A00"),
    ],
)
def test_the_tab_of_a_task_is_the_page_of_what_it_works_on(dashboard, task, target):
    with dashboard.client("viewer") as client:
        assert client.get(f"/aerie/tasks/{RUN}/{task}").headers["Location"].endswith(target)


def test_a_run_that_the_store_does_not_have_is_a_page_that_says_so(dashboard):
    assert "the store has no run nobody" in words_of(text_of(dashboard, "/runs/nobody", 404))


def test_a_document_that_lacks_a_field_is_an_error_on_the_page_and_never_a_zero(dashboard):
    with connected(dashboard.store_url) as connection:
        record_run(connection, run_id="torn", dag_id="eagle3_pipeline", edition="torn", config={"datasets": ["A1"]})
        finish_run(connection, run_id="torn", state="success", summary={"datasets": {}})
        try:
            words = words_of(text_of(dashboard, "/runs/torn"))
        finally:
            with transaction(connection) as cursor:
                cursor.execute("DELETE FROM runs WHERE run_id = 'torn'")
    assert "stored documents cannot be read" in words
    assert "budget_tokens: Field required" in words and "runs, run_id torn, summary" in words


def test_a_runs_page_and_the_card_show_its_own_alerts_and_servers_alone(dashboard):
    config = {"configuration": "demo", "datasets": [], "budget_tokens": None}
    with connected(dashboard.store_url) as connection:
        for run_id in ("pilot", "pilot-2"):
            record_run(connection, run_id=run_id, dag_id="eagle3_pipeline", edition="pilots", config=config)
        record_alert(connection, reason="run_failed", message="it never opened", run_id="pilot-2")
        document = {**lease(Path("/etc/other.log"), owner="pilot-2"), "launch_token": "launch-of-pilot-2"}
        record_lease(connection, document)
        for _ in range(201):
            record_alert(connection, reason="canary", message="of another run", run_id="pilot", edition="pilots")
        try:
            first, second = text_of(dashboard, "/runs/pilot"), text_of(dashboard, "/runs/pilot-2")
            card = words_of(text_of(dashboard, "/card"))
        finally:
            with transaction(connection) as cursor:
                cursor.execute("DELETE FROM runs WHERE edition = 'pilots'")
                cursor.execute("DELETE FROM alerts WHERE run_id LIKE 'pilot%'")
                cursor.execute("DELETE FROM leases WHERE launch_token = 'launch-of-pilot-2'")
    assert "it never opened" in second and "of another run" not in second
    assert "launch-of-pilot-2" in second and "launch-of-pilot-2" not in first
    assert "Alerts 201 " in words_of(first)
    assert "pilot-2" in card and card.endswith("Alerts 1")


def test_a_store_that_is_away_is_a_page_that_says_so(dashboard):
    with connected(dashboard.store_url) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("ALTER TABLE runs RENAME TO runs_away")
        try:
            old = words_of(text_of(dashboard, "/", 503))
        finally:
            cursor.execute("ALTER TABLE runs_away RENAME TO runs")
    assert "The store is not up to date" in old and "Traceback" not in old
