"""Every measurement of every drafter; what the registry has of a drafter is only its latest acceptance."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from psycopg2.extras import Json

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def record_benchmark(
    connection: Connection,
    *,
    measured_at: datetime,
    run_id: str,
    edition: str,
    drafter_id: str | None,
    fingerprint: str,
    concurrency: int,
    document: Mapping[str, Any],
) -> None:
    """Record a measurement at one concurrency, once: a task that finds it there hands it on again.

    ``drafter_id`` None is a drafter that is not in the registry; the document says which.
    """
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO benchmarks (measured_at, run_id, edition, drafter_id, fingerprint, concurrency, document)
            VALUES (%s, %s, %s, %s, %s, %s, %s)
            ON CONFLICT (fingerprint, concurrency, measured_at) DO NOTHING
            """,
            (measured_at, run_id, edition, drafter_id, fingerprint, concurrency, Json(document)),
        )


def list_benchmarks(
    connection: Connection, *, drafter_id: str | None = None, run_id: str | None = None, limit: int = 100
) -> list[Row]:
    """The latest measurements, newest first; None takes every drafter's, or every run's."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT * FROM benchmarks
            WHERE (%(drafter)s IS NULL OR drafter_id = %(drafter)s) AND (%(run)s IS NULL OR run_id = %(run)s)
            ORDER BY measured_at DESC, id DESC LIMIT %(limit)s
            """,
            {"drafter": drafter_id, "run": run_id, "limit": limit},
        )
        return list(as_mappings(cursor))
