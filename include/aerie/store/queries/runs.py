"""Runs of the pipeline, and the fingerprints of what they fill."""

from collections.abc import Mapping
from typing import Any

from psycopg2.extras import Json

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings

RUNNING = "running"


def record_run(connection: Connection, *, run_id: str, dag_id: str, edition: str, config: Mapping[str, Any]) -> None:
    """Record that a run began; recorded again (a retry), it is running again under the new configuration."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO runs (run_id, dag_id, edition, config, state) VALUES (%s, %s, %s, %s, %s)
            ON CONFLICT (run_id) DO UPDATE SET config = EXCLUDED.config, state = EXCLUDED.state, finished_at = NULL
            """,
            (run_id, dag_id, edition, Json(config), RUNNING),
        )


def finish_run(connection: Connection, *, run_id: str, state: str, summary: Mapping[str, Any]) -> None:
    """Record how a run ended."""
    with transaction(connection) as cursor:
        cursor.execute(
            "UPDATE runs SET state = %s, summary = %s, finished_at = now() WHERE run_id = %s",
            (state, Json(summary), run_id),
        )


def read_run(connection: Connection, *, run_id: str) -> Row | None:
    """One run, or None where it was never recorded."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM runs WHERE run_id = %s", (run_id,))
        return next(as_mappings(cursor), None)


def list_runs(connection: Connection, *, limit: int = 50) -> list[Row]:
    """The latest runs, newest first."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM runs ORDER BY started_at DESC LIMIT %s", (limit,))
        return list(as_mappings(cursor))


def read_edition(connection: Connection, *, edition: str, dataset: str) -> Row | None:
    """Fingerprints, settings and last stop of one data set of an edition, or None when nothing was generated."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM editions WHERE edition = %s AND dataset = %s", (edition, dataset))
        return next(as_mappings(cursor), None)


def list_editions(connection: Connection) -> list[Row]:
    """Every data set of every edition."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM editions ORDER BY edition, dataset")
        return list(as_mappings(cursor))


def record_edition(
    connection: Connection,
    *,
    edition: str,
    dataset: str,
    generation_fingerprint: str,
    generation_settings: Mapping[str, Any],
    rules_fingerprint: str,
    rules_settings: Mapping[str, Any],
) -> None:
    """Record what a data set is generated and judged under from now on."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO editions (edition, dataset, generation_fingerprint, generation_settings, rules_fingerprint,
                                  rules_settings)
            VALUES (%s, %s, %s, %s, %s, %s)
            ON CONFLICT (edition, dataset) DO UPDATE SET
                generation_fingerprint = EXCLUDED.generation_fingerprint,
                generation_settings = EXCLUDED.generation_settings,
                rules_fingerprint = EXCLUDED.rules_fingerprint,
                rules_settings = EXCLUDED.rules_settings,
                stopped_by = NULL, stop_message = NULL, stopped_at = NULL, updated_at = now()
            """,
            (
                edition,
                dataset,
                generation_fingerprint,
                Json(generation_settings),
                rules_fingerprint,
                Json(rules_settings),
            ),
        )


def record_stop(connection: Connection, *, edition: str, dataset: str, stopped_by: str, message: str) -> None:
    """Record why a data set stopped."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            UPDATE editions SET stopped_by = %s, stop_message = %s, stopped_at = now(), updated_at = now()
            WHERE edition = %s AND dataset = %s
            """,
            (stopped_by, message, edition, dataset),
        )
