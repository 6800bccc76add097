"""Mirror of the servers' leases; the keeper's file is the truth."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psycopg2.extras import Json

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def record_lease(connection: Connection, document: Mapping[str, Any]) -> None:
    """Record a lease document, or what became of it; ``launch_token`` identifies it.

    Raises:
        KeyError: the document has no ``launch_token``.
    """
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO leases (launch_token, document) VALUES (%s, %s)
            ON CONFLICT (launch_token) DO UPDATE SET document = EXCLUDED.document, updated_at = now()
            """,
            (document["launch_token"], Json(document)),
        )


def mark_leases_ended(connection: Connection, server_folder: Path, *, reason: str) -> None:
    """Record that the servers of a folder, whose logs lie in it, are gone; the first reason stays."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            UPDATE leases SET ended_at = now(), end_reason = %s, updated_at = now()
            WHERE ended_at IS NULL AND starts_with(document ->> 'log_path', %s)
            """,
            (reason, f"{server_folder}/"),
        )


def mark_leases_followed(connection: Connection, server_folder: Path) -> None:
    """Record that a folder has no server but the one started last, in whichever order they were recorded."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            WITH latest AS (
                SELECT launch_token, document ->> 'started_at' AS started_at FROM leases
                WHERE starts_with(document ->> 'log_path', %(logs)s)
                ORDER BY (document ->> 'started_at')::float DESC LIMIT 1
            )
            UPDATE leases SET ended_at = now(), end_reason = 'followed by ' || latest.launch_token, updated_at = now()
            FROM latest WHERE ended_at IS NULL AND starts_with(document ->> 'log_path', %(logs)s)
                AND (document ->> 'started_at')::float < latest.started_at::float
            """,
            {"logs": f"{server_folder}/"},
        )


def list_leases(
    connection: Connection, *, open_only: bool = False, held_by: str | None = None, limit: int = 20
) -> list[Row]:
    """The latest leases, newest first; ``held_by`` leaves those that the owner of exactly this name holds."""
    with transaction(connection) as cursor:
        # Documents of an earlier version have one owner, and no holders.
        cursor.execute(
            """
            SELECT * FROM leases
            WHERE (NOT %(open_only)s OR ended_at IS NULL)
                AND (%(owner)s IS NULL OR document -> 'holders' @> %(holder)s OR document ->> 'owner' = %(owner)s)
            ORDER BY recorded_at DESC LIMIT %(limit)s
            """,
            {"open_only": open_only, "owner": held_by, "holder": Json([{"owner": held_by}]), "limit": limit},
        )
        return list(as_mappings(cursor))


def read_lease(connection: Connection, *, launch_token: str) -> Row | None:
    """One lease, or None where it was never recorded."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM leases WHERE launch_token = %s", (launch_token,))
        return next(as_mappings(cursor), None)
