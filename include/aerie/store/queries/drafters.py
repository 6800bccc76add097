"""The registry of drafters."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from psycopg2.extras import Json

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings

RANKS: Mapping[str, int] = {"exported": 0, "rejected": 1, "accepted": 1, "published": 2}
"""What a drafter becomes: the later of two judgements holds, until it is published."""


def record_drafter(
    connection: Connection,
    *,
    drafter_id: str,
    edition: str,
    uri: str,
    state: str,
    training: Mapping[str, Any] | None = None,
    benchmark: Mapping[str, Any] | None = None,
    published_at: datetime | None = None,
) -> None:
    """Record a drafter, or what is newly known of it; results that are None are left as they are.

    It goes from exported to accepted, or rejected, to published. Exporting or measuring it again takes nothing back of
    that, but for the judgement of its benchmark, of which the latest holds. ``published_at`` is when it was copied to
    its destination, and belongs to the state ``published``: the latest holds, whatever is recorded of it after.
    """
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO drafters AS known (drafter_id, edition, uri, state, training, benchmark, published_at)
            VALUES (%(drafter_id)s, %(edition)s, %(uri)s, %(state)s,
                    coalesce(%(training)s::jsonb, '{}'), coalesce(%(benchmark)s::jsonb, '{}'), %(published_at)s)
            ON CONFLICT (drafter_id) DO UPDATE SET
                (state, uri) = (
                    SELECT newest.state, newest.uri
                    FROM (VALUES (EXCLUDED.state, EXCLUDED.uri, 1), (known.state, known.uri, 2))
                        AS newest (state, uri, preference)
                    ORDER BY (%(ranks)s::jsonb ->> newest.state)::int DESC, preference LIMIT 1
                ),
                updated_at = now(),
                published_at = greatest(EXCLUDED.published_at, known.published_at),
                training = coalesce(%(training)s::jsonb, known.training),
                benchmark = coalesce(%(benchmark)s::jsonb, known.benchmark)
            """,
            {
                "drafter_id": drafter_id,
                "edition": edition,
                "uri": uri,
                "state": state,
                "ranks": Json(RANKS),
                "training": None if training is None else Json(training),
                "benchmark": None if benchmark is None else Json(benchmark),
                "published_at": published_at,
            },
        )


def list_drafters(connection: Connection, *, edition: str | None = None) -> list[Row]:
    """Drafters, newest first."""
    with transaction(connection) as cursor:
        cursor.execute(
            "SELECT * FROM drafters WHERE %(edition)s IS NULL OR edition = %(edition)s ORDER BY created_at DESC",
            {"edition": edition},
        )
        return list(as_mappings(cursor))


def list_published(connection: Connection) -> list[Row]:
    """Published drafters, published last first."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM drafters WHERE state = 'published' ORDER BY published_at DESC NULLS LAST")
        return list(as_mappings(cursor))


def read_drafter(connection: Connection, *, drafter_id: str) -> Row | None:
    """One drafter, or None where there is none of this id."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM drafters WHERE drafter_id = %s", (drafter_id,))
        return next(as_mappings(cursor), None)


def page_of_drafters(connection: Connection, *, number: int, rows: int = 50) -> tuple[list[Row], bool]:
    """Page ``number``, from 1, of the drafters, newest first, and whether there is another page after it."""
    with transaction(connection) as cursor:
        cursor.execute(
            "SELECT * FROM drafters ORDER BY created_at DESC, drafter_id LIMIT %s OFFSET %s",
            (rows + 1, (number - 1) * rows),
        )
        found = list(as_mappings(cursor))
    return found[:rows], len(found) > rows
