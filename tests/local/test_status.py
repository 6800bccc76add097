from datetime import UTC, datetime

from aerie.local.status import generation_lines
from aerie.store.connection import connected
from aerie.store.queries.ledger import only_writer
from aerie.store.queries.metrics import MetricRow, record_metrics

FIGURES = {
    "done": 9860, "prompts": 10000, "failed": 0, "requests_per_second": 0.5, "mean_completion_tokens": 1941.2,
    "elapsed_seconds": 18562.0, "eta_low_seconds": 360.0, "eta_high_seconds": 1000.0, "response_tokens": 9_900_000,
    "budget_tokens": 10_000_000, "tokens_per_second": 1040.0, "in_flight": 12, "quarantine_share": 0.012,
    "server_running": 12, "server_queued": 0, "server_token_usage": 0.31, "server_tokens_per_second": 1038.0,
    "gpu_utilisation": 0.97,
}  # fmt: skip


def record(connection, dataset, figures, stage="generate"):
    row = MetricRow(datetime.now(UTC), "run-1", "main", dataset, stage, figures)
    record_metrics(connection, [row])


def test_status_shows_the_latest_progress_of_what_is_being_generated_and_of_nothing_else(database_url):
    with connected(database_url) as generator, connected(database_url) as recorder:
        record(recorder, "B1_glaive", {**FIGURES, "done": 1})
        with (
            only_writer(generator, edition="main", dataset="B1_glaive", run_id="run-1"),
            only_writer(generator, edition="main", dataset="B2_opencodeinstruct", run_id="run-1"),
        ):
            record(recorder, "B1_glaive", {**FIGURES, "done": 2})
            record(recorder, "B1_glaive", FIGURES)
            record(recorder, "B1_glaive", {"rows": 3}, stage="validate")
            assert list(generation_lines(database_url)) == [
                "main/B1_glaive: Progress: 9860/10000 (0 errors), 0.5 req/s, avg completion: 1941 tokens, "
                "elapsed: 18562s, ETA: 0.1-0.3h, tokens of budget: 9,900,000/10,000,000 (99.0%), 1040 tok/s, "
                "in flight: 12, quarantined: 1.2%, server: 12 running, 0 queued, token usage: 0.31, 1038 tok/s, "
                "GPU: 97%",
                "main/B2_opencodeinstruct: no progress yet",
            ]
        assert list(generation_lines(database_url)) == [], "a data set that nobody writes was shown as generated"


def test_status_says_so_when_the_database_does_not_answer():
    (line,) = generation_lines("postgresql://aerie:hush@127.0.0.1:1/aerie")
    assert "not known" in line and "hush" not in line
