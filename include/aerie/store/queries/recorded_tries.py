"""How far the tries of tasks on hosts without a database were recorded."""

from dataclasses import dataclass

from aerie.store.connection import Connection, transaction


@dataclass(frozen=True)
class Try:
    """One try of one task of a run."""

    run_id: str
    task_id: str
    number: int


def read_recorded(connection: Connection, one: Try) -> tuple[int, bool]:
    """How many of a try's events were recorded, and whether its result was."""
    with transaction(connection) as cursor:
        cursor.execute(
            "SELECT events, has_result FROM recorded_tries WHERE run_id = %s AND task_id = %s AND try_number = %s",
            (one.run_id, one.task_id, one.number),
        )
        row = cursor.fetchone()
        return (row[0], row[1]) if row else (0, False)


def mark_recorded(connection: Connection, one: Try, *, events: int, has_result: bool) -> None:
    """Note how far a try was recorded."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO recorded_tries (run_id, task_id, try_number, events, has_result) VALUES (%s, %s, %s, %s, %s)
            ON CONFLICT (run_id, task_id, try_number)
                DO UPDATE SET events = EXCLUDED.events, has_result = EXCLUDED.has_result, recorded_at = now()
            """,
            (one.run_id, one.task_id, one.number, events, has_result),
        )
