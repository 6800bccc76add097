"""The time series that stages report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg2.extras import Json, execute_values

from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings


@dataclass(frozen=True)
class MetricRow:
    """Figures of one interval; ``at`` carries its time zone."""

    at: datetime
    run_id: str
    edition: str
    dataset: str | None
    stage: str
    figures: Mapping[str, float | int | str | None]


def record_metrics(connection: Connection, rows: Sequence[MetricRow]) -> None:
    """Append rows to the time series."""
    if not rows:
        return
    with transaction(connection) as cursor:
        execute_values(
            cursor,
            "INSERT INTO interval_metrics (at, run_id, edition, dataset, stage, figures) VALUES %s",
            [(row.at, row.run_id, row.edition, row.dataset, row.stage, Json(row.figures)) for row in rows],
        )


def read_metrics(
    connection: Connection, *, edition: str, stage: str, dataset: str | None = None, since: datetime | None = None
) -> list[Row]:
    """The time series of a stage, oldest first; ``dataset`` None takes every data set."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT at, run_id, dataset, figures FROM interval_metrics
            WHERE edition = %(edition)s AND stage = %(stage)s
                AND (%(dataset)s IS NULL OR dataset = %(dataset)s)
                AND (%(since)s::timestamptz IS NULL OR at >= %(since)s)
            ORDER BY at, id
            """,
            {"edition": edition, "stage": stage, "dataset": dataset, "since": since},
        )
        return list(as_mappings(cursor))


def sample_metrics(
    connection: Connection,
    *,
    edition: str,
    stage: str,
    dataset: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    points: int = 120,
) -> list[Row]:
    """At most ``points`` rows of a time series, evenly spread over its time, oldest first, the latest one included.

    ``dataset`` None takes the series of stages that work on the whole edition. One index look-up a point: a long series
    costs what a short one does.
    """
    series = "edition = %(edition)s AND stage = %(stage)s AND dataset "
    series += "IS NULL" if dataset is None else "= %(dataset)s"
    span = series
    if since is not None:
        span += " AND at >= %(since)s"
    if until is not None:
        span += " AND at <= %(until)s"
    with transaction(connection) as cursor:
        # Ordered by the data set too, though it is the same everywhere: else no index gives the order where it is null.
        cursor.execute(
            f"""
            WITH ends AS (
                SELECT (SELECT at FROM interval_metrics WHERE {span} ORDER BY dataset, at LIMIT 1) AS first,
                       (SELECT at FROM interval_metrics WHERE {span} ORDER BY dataset DESC, at DESC LIMIT 1) AS last
            )
            SELECT DISTINCT ON (metric.at, metric.id) metric.at, metric.run_id, metric.dataset, metric.figures
            FROM ends, generate_series(0, %(points)s - 1) AS number,
                LATERAL (
                    SELECT * FROM interval_metrics
                    WHERE {series} AND at >= first + (last - first) * (number / greatest(%(points)s - 1, 1)::float)
                    ORDER BY dataset, at LIMIT 1
                ) AS metric
            ORDER BY metric.at, metric.id
            """,  # noqa: S608 - our own words
            {
                "edition": edition,
                "stage": stage,
                "dataset": dataset,
                "since": since,
                "until": until,
                "points": points,
            },
        )
        return list(as_mappings(cursor))
