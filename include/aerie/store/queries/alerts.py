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
    task_id: str | None = None,
    try_number: int | None = None,
    log_url: str | None = None,
) -> int:
    """Record an alert; returns its id."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO alerts (run_id, edition, dataset, stage, task_id, try_number, log_url, reason, message)
            VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) RETURNING id
            """,
            (run_id, edition, dataset, stage, task_id, try_number, log_url, reason, message),
        )
        return int(next(cursor)[0])


def record_delivery(connection: Connection, *, alert_id: int, delivered: bool, error: str | None) -> None:
    """Record what became of an alert: whether a receiver took it, and what those said that did not."""
    with transaction(connection) as cursor:
        cursor.execute(
            "UPDATE alerts SET delivered_at = CASE WHEN %s THEN now() END, delivery_error = %s WHERE id = %s",
            (delivered, error, alert_id),
        )


def list_alerts(
    connection: Connection, *, edition: str | None = None, run_id: str | None = None, limit: int = 100
) -> list[Row]:
    """The latest alerts, newest first."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT * FROM alerts
            WHERE (%(edition)s IS NULL OR edition = %(edition)s) AND (%(run_id)s IS NULL OR run_id = %(run_id)s)
            ORDER BY at DESC, id DESC LIMIT %(limit)s
            """,
            {"edition": edition, "run_id": run_id, "limit": limit},
        )
        return list(as_mappings(cursor))


def count_alerts(connection: Connection, *, run_id: str) -> int:
    """How many alerts a run has."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT count(*) FROM alerts WHERE run_id = %s", (run_id,))
        return int(next(cursor)[0])


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


def has_told(
    connection: Connection,
    *,
    run_id: str,
    task_id: str,
    try_number: int | None,
    reason: str,
    message: str,
    within_try: bool = False,
) -> bool:
    """Whether somebody was told of this before by a task: of this reason, or in these very words in this try.

    ``within_try`` counts a reason only where this try told of it.
    """
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT EXISTS (
                SELECT FROM alerts
                WHERE run_id = %(run_id)s AND task_id = %(task_id)s AND delivered_at IS NOT NULL
                AND (reason = %(reason)s AND NOT %(within_try)s
                     OR try_number = %(try_number)s AND (reason = %(reason)s OR message = %(message)s))
            )
            """,
            {
                "run_id": run_id,
                "task_id": task_id,
                "try_number": try_number,
                "reason": reason,
                "message": message,
                "within_try": within_try,
            },
        )
        return bool(next(cursor)[0])
