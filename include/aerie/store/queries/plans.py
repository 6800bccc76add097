"""The memory plan and timeline that a run began with."""

from collections.abc import Mapping
from typing import Any

from psycopg2.extras import Json

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def record_plan(connection: Connection, *, run_id: str, edition: str, document: Mapping[str, Any]) -> None:
    """Record a run's plan (``aerie.plan_report.document_of``); planned again, the later one stands."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO plans (run_id, edition, document) VALUES (%s, %s, %s)
            ON CONFLICT (run_id) DO UPDATE SET document = EXCLUDED.document, recorded_at = now()
            """,
            (run_id, edition, Json(document)),
        )


def read_plan(connection: Connection, *, run_id: str) -> Row | None:
    """A run's plan, or None where it has none."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM plans WHERE run_id = %s", (run_id,))
        return next(as_mappings(cursor), None)


def latest_plan(connection: Connection) -> Row | None:
    """The plan made last, or None."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM plans ORDER BY recorded_at DESC LIMIT 1")
        return next(as_mappings(cursor), None)
