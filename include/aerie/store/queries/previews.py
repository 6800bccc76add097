"""Decoded samples for people."""

from collections.abc import Iterable, Mapping
from typing import Any

from psycopg2.extras import Json, execute_values

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def load_previews(connection: Connection, *, edition: str, dataset: str, previews: Iterable[Mapping[str, Any]]) -> int:
    """Replace a data set's previews; each document has a ``sample_id``. Returns how many there are.

    Raises:
        KeyError: a document has no ``sample_id``.
    """
    rows = [(edition, dataset, preview["sample_id"], Json(preview)) for preview in previews]
    with transaction(connection) as cursor:
        cursor.execute("DELETE FROM previews WHERE edition = %s AND dataset = %s", (edition, dataset))
        execute_values(cursor, "INSERT INTO previews (edition, dataset, sample_id, document) VALUES %s", rows)
    return len(rows)


def list_previews(connection: Connection, *, edition: str, dataset: str, limit: int = 50) -> list[Row]:
    """Previews of a data set, with the state, reasons and flags that the ledger has for each."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT previews.sample_id, previews.document, samples.state, samples.reasons, samples.flags
            FROM previews LEFT JOIN samples USING (edition, dataset, sample_id)
            WHERE previews.edition = %s AND previews.dataset = %s ORDER BY sample_id LIMIT %s
            """,
            (edition, dataset, limit),
        )
        return list(as_mappings(cursor))
