"""Decoded samples for people."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from psycopg2.extras import Json, execute_values

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings

Source = Literal["canary", "validate"]


def load_previews(
    connection: Connection, *, edition: str, dataset: str, source: Source, previews: Iterable[Mapping[str, Any]]
) -> int:
    """Replace the previews that ``source`` loaded of a data set; each document has a ``sample_id``. Returns how many.

    Where both decoded a sample, that of ``validate`` stands: it has seen the whole text, and is the later one.

    Raises:
        KeyError: a document has no ``sample_id``.
    """
    rows = [(edition, dataset, preview["sample_id"], source, Json(preview)) for preview in previews]
    with transaction(connection) as cursor:
        cursor.execute(
            "DELETE FROM previews WHERE edition = %s AND dataset = %s AND source = %s", (edition, dataset, source)
        )
        execute_values(
            cursor,
            """
            INSERT INTO previews AS known (edition, dataset, sample_id, source, document) VALUES %s
            ON CONFLICT (edition, dataset, sample_id) DO UPDATE SET
                source = EXCLUDED.source, document = EXCLUDED.document, loaded_at = now()
            WHERE EXCLUDED.source = 'validate' OR known.source = 'canary'
            """,
            rows,
        )
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
