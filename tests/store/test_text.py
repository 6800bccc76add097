"""Text that PostgreSQL refuses, in everything that is written into the store."""

from datetime import UTC, datetime

import pytest

from aerie.store.connection import connected
from aerie.store.queries import alerts, leases, ledger, metrics, previews, runs

KEY = {"edition": "main", "dataset": "B1_glaive"}
REFUSED, KEPT = "a\0b\ud800c", "a␀b�c"


@pytest.fixture
def connection(database_url):
    with connected(database_url) as opened:
        yield opened


def test_a_null_character_in_decoded_text_refuses_no_preview(connection):
    document = {"sample_id": "s", "spans": [["prompt", REFUSED]], "positions": {REFUSED: 1}}
    for source in ("canary", "validate"):
        previews.load_previews(connection, **KEY, source=source, previews=[document])
        (shown,) = previews.list_previews(connection, **KEY)
        assert shown["document"] == {"sample_id": "s", "spans": [["prompt", KEPT]], "positions": {KEPT: 1}}


def test_a_failed_sample_with_any_text_in_its_detail_stays_in_the_ledger(connection):
    row = ledger.LedgerRow("s", "failed", reasons=(REFUSED,), detail=f"the server said {REFUSED}, not \\u0000")
    ledger.write_rows(connection, **KEY, rows=[row])
    kept = ledger.read_ledger(connection, **KEY)["s"]
    assert (kept.reasons, kept.detail) == ((KEPT,), f"the server said {KEPT}, not \\u0000")
    assert ledger.list_samples(connection, **KEY, state="failed", reason=REFUSED), "it is found by what it was"


def test_whatever_a_message_or_a_document_quotes_is_recorded(connection):
    alerts.record_alert(connection, reason="task_failed", message=REFUSED)
    assert alerts.list_alerts(connection)[0]["message"] == KEPT
    runs.record_run(connection, run_id="r", dag_id="d", edition="main", config={"path": REFUSED})
    runs.finish_run(connection, run_id="r", state="failed", summary={"skipped": {"examples": (REFUSED,)}})
    row = runs.read_run(connection, run_id="r")
    assert (row["config"], row["summary"]) == ({"path": KEPT}, {"skipped": {"examples": [KEPT]}})
    leases.record_lease(connection, {"launch_token": "t", "error": REFUSED})
    assert leases.read_lease(connection, launch_token="t")["document"]["error"] == KEPT
    figures = metrics.MetricRow(datetime.now(UTC), "r", "main", None, "train", {"note": REFUSED})
    metrics.record_metrics(connection, [figures])
    assert metrics.read_metrics(connection, edition="main", stage="train")[0]["figures"] == {"note": KEPT}
