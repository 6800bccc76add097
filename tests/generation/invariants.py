"""What holds of a data set after any crash, once a generator has started on it again."""

from pathlib import Path

from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.prompts import iterate_prompts
from aerie.artefacts.response_log import latest_responses
from aerie.generation.reconciliation import JUDGED
from aerie.store.connection import connected
from aerie.store.queries.ledger import count_ledger, read_ledger


def check_invariants(files: DatasetFiles, database_url: str, *, edition: str, dataset: str) -> None:
    """Every prompt in exactly one state, no sample twice among the latest rows, the same tokens in log and ledger."""
    with connected(database_url) as connection:
        ledger = read_ledger(connection, edition=edition, dataset=dataset)
        counts = count_ledger(connection, edition=edition, dataset=dataset)
    assert set(ledger) == {prompt.sample_id for prompt in iterate_prompts(files.prompts)}
    states = counts.pending + counts.in_flight + counts.kept + counts.quarantined + counts.skipped + counts.failed
    assert states == counts.prompts == len(ledger)
    latest = list(latest_responses(files.responses))
    tokens = {response.sample_id: response.completion_tokens for response in latest}
    assert len(tokens) == len(latest), "a sample is twice among the latest rows"
    judged = {row.sample_id: row.completion_tokens for row in ledger.values() if row.state in JUDGED}
    assert judged == tokens
    kept = [response for response in latest if ledger[response.sample_id].state == "kept"]
    assert all(len(response.output_ids) == response.completion_tokens for response in kept)
    assert sum(len(response.output_ids) for response in kept) == counts.kept_response_tokens


def check_durable_before_counted(responses: Path, database_url: str, *, edition: str, dataset: str) -> set[str]:
    """What holds the moment a generator was killed: what the ledger counts is in the log. Returns the log's ids."""
    logged = {response.sample_id: response.completion_tokens for response in latest_responses(responses)}
    with connected(database_url) as connection:
        ledger = read_ledger(connection, edition=edition, dataset=dataset)
    for row in ledger.values():
        assert row.state not in JUDGED or logged.get(row.sample_id) == row.completion_tokens, row
    return set(logged)
