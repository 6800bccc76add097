from datetime import UTC, datetime

from aerie.artefacts.manifest import Manifest
from aerie.store.connection import connected
from aerie.store.queries.ledger import LedgerRow, write_rows
from aerie.store.queries.manifests import record_manifest
from aerie.summary import build_summary, in_order


def manifest(stage: str, dataset: str | None, counts: dict) -> Manifest:
    return Manifest(
        schema=1, stage=stage, edition="main", dataset=dataset, fingerprint="f", inputs=(), outputs=(), counts=counts,
        finished_at=datetime.now(UTC),
    )  # fmt: skip


def test_every_figure_of_a_data_set_is_the_ledgers(make_request, database_url):
    rows = [
        LedgerRow("a", "kept", completion_tokens=30, prompt_tokens=5),
        LedgerRow("b", "kept", completion_tokens=12, prompt_tokens=5, flags=("repetition",)),
        LedgerRow("c", "quarantined", completion_tokens=99, prompt_tokens=5, reasons=("no_close",)),
        LedgerRow("d", "pending"),
        LedgerRow("e", "skipped", reasons=("held_out",)),
    ]
    with connected(database_url) as connection:
        write_rows(connection, edition="main", dataset="B1_glaive", rows=rows)
        record_manifest(connection, manifest("validate", "B1_glaive", {"reasoning_share": 0.5}), None)
        summary = build_summary(connection, make_request())
    assert summary["datasets"] == {
        "B1_glaive": {
            "prompts": 5, "generated": 3, "kept": 2, "quarantined": 1, "flagged": 1, "response_tokens": 42,
            "budget": 3500, "stopped_by": None, "reasoning_share": 0.5,
        }
    }  # fmt: skip


def test_a_part_that_never_ran_is_absent_and_not_zero(make_request, database_url):
    with connected(database_url) as connection:
        summary = build_summary(connection, make_request())
    absent = {"corpus": None, "hidden_states": None, "training": None, "benchmark": None}
    assert summary == {"datasets": {}, "decisions": [], **absent}


def test_data_sets_are_listed_in_the_pipelines_order():
    shuffled = {"datasets": {"A1": 1, "B8_sweagent": 2, "B1_glaive": 3}, "benchmark": None}
    assert list(in_order(shuffled)["datasets"]) == ["B1_glaive", "B8_sweagent", "A1"]
