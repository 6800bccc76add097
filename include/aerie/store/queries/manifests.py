"""Manifests of finished stages."""

from psycopg2.extras import Json

from aerie.artefacts.manifest import Manifest
from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def record_manifest(connection: Connection, manifest: Manifest, run_id: str | None) -> None:
    """Record a manifest; one that is there already (a stage that had nothing to do) is left as it is."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO manifests (run_id, edition, dataset, stage, fingerprint, document, finished_at)
            VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
            """,
            (
                run_id,
                manifest.edition,
                manifest.dataset,
                manifest.stage,
                manifest.fingerprint,
                Json(manifest.model_dump(mode="json", by_alias=True)),
                manifest.finished_at,
            ),
        )


def latest_manifests(connection: Connection, *, edition: str) -> list[Row]:
    """The newest manifest of each stage and data set of an edition."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT DISTINCT ON (stage, dataset) * FROM manifests WHERE edition = %s
            ORDER BY stage, dataset, finished_at DESC
            """,
            (edition,),
        )
        return list(as_mappings(cursor))


def list_manifests(connection: Connection, *, edition: str) -> list[Row]:
    """Every manifest of an edition, oldest first."""
    with transaction(connection) as cursor:
        cursor.execute("SELECT * FROM manifests WHERE edition = %s ORDER BY finished_at, id", (edition,))
        return list(as_mappings(cursor))
