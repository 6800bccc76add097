"""What people decided where a run asked them."""

from datetime import datetime

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def record_decision(
    connection: Connection,
    *,
    run_id: str,
    edition: str,
    task_id: str,
    subject: str,
    body: str,
    approved: bool,
    decided_by: str,
    decided_at: datetime,
) -> None:
    """Record a decision, once: a task that is tried again hands it on again."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO decisions (run_id, edition, task_id, subject, body, approved, decided_by, decided_at)
            VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (run_id, task_id, decided_at) DO NOTHING
            """,
            (run_id, edition, task_id, subject, body, approved, decided_by, decided_at),
        )


def list_decisions(connection: Connection, *, run_id: str) -> list[Row]:
    """The decisions that hold in a run, oldest first: the latest of each task that asked."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT * FROM (
                SELECT DISTINCT ON (task_id) * FROM decisions WHERE run_id = %s ORDER BY task_id, decided_at DESC
            ) AS latest ORDER BY decided_at
            """,
            (run_id,),
        )
        return list(as_mappings(cursor))
