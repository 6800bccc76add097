"""What servers turned out to hold, launch by launch; the file beside the lease has those of one host."""

from datetime import UTC, datetime

from psycopg2.extras import Json

from aerie.artefacts.observations import Observation
from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


def record_observation(connection: Connection, observation: Observation) -> None:
    """Record a launch, once: every stage that uses the server hands its observation on."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            INSERT INTO observations (launch_token, model_identity, hostname, sglang_version, observed_at, document)
            VALUES (%s, %s, %s, %s, %s, %s)
            ON CONFLICT (launch_token) DO NOTHING
            """,
            (
                observation.launch_token,
                observation.model_identity,
                observation.hostname,
                observation.sglang_version,
                datetime.fromtimestamp(observation.observed_at, UTC),
                Json(observation.model_dump(mode="json")),
            ),
        )


def observations_of(
    connection: Connection, *, model_identity: str, hostname: str | None = None, sglang_version: str | None = None
) -> tuple[Observation, ...]:
    """Launches of a model, oldest first; of every host and version where none is named."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT document FROM observations
            WHERE model_identity = %(model)s AND (%(host)s IS NULL OR hostname = %(host)s)
                AND (%(version)s IS NULL OR sglang_version = %(version)s)
            ORDER BY observed_at, launch_token
            """,
            {"model": model_identity, "host": hostname, "version": sglang_version},
        )
        return tuple(Observation.model_validate(document) for (document,) in cursor)


def latest_observations(connection: Connection, *, limit: int) -> list[Row]:
    """The latest launches of every model and host as they are stored, oldest first."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT * FROM (SELECT launch_token, observed_at, document FROM observations
                           ORDER BY observed_at DESC LIMIT %s) AS latest
            ORDER BY observed_at, launch_token
            """,
            (limit,),
        )
        return list(as_mappings(cursor))
