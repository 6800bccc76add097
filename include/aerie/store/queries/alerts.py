"""What a person should be told of."""

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def record_alert(
    connection: Connection,
    *,
    reason: str,
    message: str,
    run_id: str | None = None,
    edition: str | None = None,
    dataset: str | None = None,
    stage: str | None = None,
) -> None:
    """Record an alert."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO alerts (run_id, edition, dataset, stage, reason, message) VALUES (%s, %s, %s, %s, %s, %s)
            """,
            (run_id, edition, dataset, stage, reason, message),
        )


def list_alerts(connection: Connection, *, edition: str | None = None, limit: int = 100) -> list[Row]:
    """The latest alerts, newest first."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT * FROM alerts WHERE %(edition)s IS NULL OR edition = %(edition)s
            ORDER BY at DESC, id DESC LIMIT %(limit)s
            """,
            {"edition": edition, "limit": limit},
        )
        return list(as_mappings(cursor))


def acknowledge_alert(connection: Connection, *, alert_id: int, user: str) -> bool:
    """Record who has seen an alert; the first stays. False where there is no such alert."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            UPDATE alerts SET acknowledged_at = coalesce(acknowledged_at, now()),
                acknowledged_by = coalesce(acknowledged_by, %s)
            WHERE id = %s
            """,
            (user, alert_id),
        )
        return cursor.rowcount == 1
