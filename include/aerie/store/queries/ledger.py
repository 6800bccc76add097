"""The ledger: one row a prompt, in exactly one of six states."""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Literal

from psycopg2.extras import execute_values
from pydantic_core import to_json

from aerie.artefacts.samples import VerdictRow
from aerie.errors import Busy, Failed, Retryable
from aerie.store.connection import Connection, transaction
from aerie.store.queries.rows import Row, as_mappings
from aerie.store.text import storable

State = Literal["pending", "in_flight", "kept", "quarantined", "skipped", "failed"]
Judge = Literal["generate", "validate"]
PAGE_ROWS = 1000


@dataclass(frozen=True)
class LedgerRow:
    """One prompt of a data set.

    ``attempts`` counts requests sent. The four counts after it are of the latest response, None before there is one;
    ``generated_tokens`` adds up every response, replaced ones included. ``judged_by`` is the stage whose verdict this
    is, ``response_crc32`` the checksum of the response log's row that was judged. ``detail`` says why a sample failed.
    """

    sample_id: str
    state: State
    attempts: int = 0
    reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    detail: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    tool_calls: int | None = None
    generated_tokens: int = 0
    finish_reason: str | None = None
    judged_by: Judge | None = None
    response_crc32: int | None = None
    admission_rank: int | None = None
    split: str | None = None


@dataclass(frozen=True)
class LedgerCounts:
    """What a data set adds up to; the six states sum to ``prompts``. Tokens named kept are of kept samples only.

    ``judged_tokens`` are response tokens of kept and quarantined samples; ``generated_tokens`` adds replaced responses.
    """

    prompts: int
    pending: int
    in_flight: int
    kept: int
    quarantined: int
    skipped: int
    failed: int
    flagged: int
    kept_response_tokens: int
    kept_prompt_tokens: int
    judged_tokens: int
    generated_tokens: int
    prompt_tokens: int


_COLUMNS = tuple(field.name for field in fields(LedgerRow))
_COLUMN_LIST = ", ".join(_COLUMNS)
_REPLACEMENTS = ", ".join(f"{name} = EXCLUDED.{name}" for name in _COLUMNS if name != "sample_id")
# One parameter for all rows: spelling out each value costs the driver four times as much.
_UPSERT = (
    f"INSERT INTO samples (edition, dataset, {_COLUMN_LIST}) "  # noqa: S608 - our own column names
    f"SELECT %(edition)s, %(dataset)s, {_COLUMN_LIST} FROM json_populate_recordset(NULL::samples, %(rows)s) "
    f"ON CONFLICT (edition, dataset, sample_id) DO UPDATE SET {_REPLACEMENTS}, updated_at = now()"
)
# Of the table that the database keeps up to date itself as samples are written.
_COUNTS = """
    coalesce(sum(samples), 0)::bigint AS prompts,
    coalesce(sum(samples) FILTER (WHERE state = 'pending'), 0)::bigint AS pending,
    coalesce(sum(samples) FILTER (WHERE state = 'in_flight'), 0)::bigint AS in_flight,
    coalesce(sum(samples) FILTER (WHERE state = 'kept'), 0)::bigint AS kept,
    coalesce(sum(samples) FILTER (WHERE state = 'quarantined'), 0)::bigint AS quarantined,
    coalesce(sum(samples) FILTER (WHERE state = 'skipped'), 0)::bigint AS skipped,
    coalesce(sum(samples) FILTER (WHERE state = 'failed'), 0)::bigint AS failed,
    coalesce(sum(samples) FILTER (WHERE state = 'kept' AND flags <> '{}'), 0)::bigint AS flagged,
    coalesce(sum(completion_tokens) FILTER (WHERE state = 'kept'), 0)::bigint AS kept_response_tokens,
    coalesce(sum(prompt_tokens) FILTER (WHERE state = 'kept'), 0)::bigint AS kept_prompt_tokens,
    coalesce(sum(completion_tokens) FILTER (WHERE state IN ('kept', 'quarantined')), 0)::bigint AS judged_tokens,
    coalesce(sum(generated_tokens), 0)::bigint AS generated_tokens,
    coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens
"""


def read_ledger(connection: Connection, *, edition: str, dataset: str) -> dict[str, LedgerRow]:
    """Every row of a data set, by sample id."""
    with transaction(connection) as cursor:
        cursor.execute(
            f"SELECT {_COLUMN_LIST} FROM samples WHERE edition = %s AND dataset = %s",  # noqa: S608
            (edition, dataset),
        )
        rows = (_make_row(values) for values in cursor)
        return {row.sample_id: row for row in rows}


def _make_row(values: Sequence[Any]) -> LedgerRow:
    """A row of the ledger from its columns, without the ``__init__`` of a frozen class: a resume makes 100,000."""
    row = object.__new__(LedgerRow)
    found = vars(row)
    found.update(zip(_COLUMNS, values, strict=True))
    found["reasons"], found["flags"] = tuple(found["reasons"]), tuple(found["flags"])
    return row


def write_rows(connection: Connection, *, edition: str, dataset: str, rows: Iterable[LedgerRow]) -> None:
    """Insert or replace rows, all of them or none."""
    waiting = iter(rows)
    with transaction(connection) as cursor:
        while page := list(islice(waiting, PAGE_ROWS)):
            # Only the detail of a failure quotes what others wrote; to look into every row costs six times as much.
            written = to_json([row if row.detail is None else storable(vars(row)) for row in page]).decode()
            cursor.execute(_UPSERT, {"edition": edition, "dataset": dataset, "rows": written})


def delete_rows(connection: Connection, *, edition: str, dataset: str, sample_ids: Sequence[str]) -> None:
    """Remove rows of prompts that are no longer there."""
    with transaction(connection) as cursor:
        cursor.execute(
            "DELETE FROM samples WHERE edition = %s AND dataset = %s AND sample_id = ANY(%s)",
            (edition, dataset, list(sample_ids)),
        )


def count_ledger(connection: Connection, *, edition: str, dataset: str) -> LedgerCounts:
    """What a data set adds up to; all zeros where it has no rows."""
    with transaction(connection) as cursor:
        cursor.execute(
            f"SELECT {_COUNTS} FROM sample_totals WHERE edition = %s AND dataset = %s",  # noqa: S608
            (edition, dataset),
        )
        return LedgerCounts(**next(as_mappings(cursor)))


def count_editions(connection: Connection, *, edition: str | None = None) -> dict[tuple[str, str], LedgerCounts]:
    """Counts by edition and data set, of one edition or of all."""
    with transaction(connection) as cursor:
        cursor.execute(
            f"""
            SELECT edition, dataset, {_COUNTS} FROM sample_totals
            WHERE %(edition)s IS NULL OR edition = %(edition)s
            GROUP BY edition, dataset HAVING sum(samples) > 0 ORDER BY edition, dataset
            """,  # noqa: S608
            {"edition": edition},
        )
        return {(row.pop("edition"), row.pop("dataset")): LedgerCounts(**row) for row in as_mappings(cursor)}


def count_reasons(connection: Connection, *, edition: str, dataset: str) -> dict[str, dict[str, int]]:
    """How often each reason (by state) and each flag (under ``flags``) occurs."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT kind, name, sum(samples)::bigint AS rows
            FROM sample_totals, LATERAL (
                SELECT state, unnest(reasons) UNION ALL SELECT 'flags', unnest(flags) WHERE state = 'kept'
            ) AS found (kind, name)
            WHERE edition = %(edition)s AND dataset = %(dataset)s AND samples > 0
            GROUP BY kind, name ORDER BY kind, rows DESC, name
            """,
            {"edition": edition, "dataset": dataset},
        )
        found: dict[str, dict[str, int]] = {}
        for row in as_mappings(cursor):
            found.setdefault(row["kind"], {})[row["name"]] = row["rows"]
        return found


def list_samples(
    connection: Connection, *, edition: str, dataset: str, state: State, reason: str | None = None, limit: int = 100
) -> list[Row]:
    """Rows in a state, in admission order; ``reason`` narrows them."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT * FROM samples WHERE edition = %(edition)s AND dataset = %(dataset)s AND state = %(state)s
                AND (%(reason)s IS NULL OR %(reason)s = ANY(reasons))
            ORDER BY admission_rank, sample_id LIMIT %(limit)s
            """,
            {"edition": edition, "dataset": dataset, "state": state, "reason": reason, "limit": limit},
        )
        return list(as_mappings(cursor))


def find_samples(
    connection: Connection,
    *,
    edition: str,
    dataset: str | None = None,
    reason: str | None = None,
    sample_ids: Sequence[str] = (),
) -> dict[str, list[LedgerRow]]:
    """Samples that came out, by data set, in admission order.

    Those of ``sample_ids``; else those with ``reason`` as a reason or a flag; else those that are quarantined.
    """
    with transaction(connection) as cursor:
        cursor.execute(
            f"""
            SELECT dataset, {_COLUMN_LIST} FROM samples WHERE edition = %(edition)s
                AND (%(dataset)s IS NULL OR dataset = %(dataset)s)
                AND (cardinality(%(ids)s::text[]) = 0 OR sample_id = ANY(%(ids)s))
                AND (%(reason)s IS NULL OR %(reason)s = ANY(reasons) OR %(reason)s = ANY(flags))
                AND (state = 'quarantined'
                    OR (cardinality(%(ids)s::text[]) > 0 OR %(reason)s IS NOT NULL) AND state IN ('kept', 'failed'))
            ORDER BY dataset, admission_rank, sample_id
            """,  # noqa: S608
            {"edition": edition, "dataset": dataset, "reason": reason, "ids": list(sample_ids)},
        )
        found: dict[str, list[LedgerRow]] = {}
        for key, sample_id, state, attempts, reasons, flags, *others in cursor:
            row = LedgerRow(sample_id, state, attempts, tuple(reasons), tuple(flags), *others)
            found.setdefault(key, []).append(row)
        return found


def load_verdicts(connection: Connection, *, edition: str, dataset: str, verdicts: Iterable[VerdictRow]) -> int:
    """Take over the verdicts of ``validate``: state, reasons, flags and token counts. Returns how many there are.

    Rows that the ledger does not have (imported data sets are not generated) are added.

    Raises:
        Failed: a verdict is neither ``kept`` nor ``quarantined``.
    """
    count = 0

    def values() -> Iterator[tuple[object, ...]]:
        nonlocal count
        for row in verdicts:
            if row.verdict not in ("kept", "quarantined"):
                raise Failed(
                    f"verdict of {edition}/{dataset}/{row.sample_id} is {row.verdict!r}: "
                    "expected 'kept' or 'quarantined'"
                )
            count += 1
            yield (
                edition, dataset, row.sample_id, row.verdict, list(row.reasons), list(row.flags), row.prompt_tokens,
                row.completion_tokens, row.reasoning_tokens, row.tool_calls, "validate",
            )  # fmt: skip

    with transaction(connection) as cursor:
        execute_values(
            cursor,
            """
            INSERT INTO samples (edition, dataset, sample_id, state, reasons, flags, prompt_tokens, completion_tokens,
                                 reasoning_tokens, tool_calls, judged_by)
            VALUES %s ON CONFLICT (edition, dataset, sample_id) DO UPDATE SET
                state = EXCLUDED.state, reasons = EXCLUDED.reasons, flags = EXCLUDED.flags,
                prompt_tokens = EXCLUDED.prompt_tokens, completion_tokens = EXCLUDED.completion_tokens,
                reasoning_tokens = EXCLUDED.reasoning_tokens, tool_calls = EXCLUDED.tool_calls,
                judged_by = EXCLUDED.judged_by, updated_at = now()
            """,
            values(),
            page_size=PAGE_ROWS,
        )
    return count


@contextmanager
def only_writer(connection: Connection, *, edition: str, dataset: str, run_id: str) -> Iterator[None]:
    """Hold the right to write a data set, for as long as the connection lives.

    Raises:
        Busy: another process holds it; the message names its run, host and process, and since when.
    """
    name = _lock_name(edition, dataset)
    with transaction(connection) as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", (name,))
        held = cursor.fetchone()
        if held != (True,):
            holder = _writer_of(connection, edition=edition, dataset=dataset)
            raise Busy(_refusal(holder, edition=edition, dataset=dataset))
        cursor.execute(
            """
            INSERT INTO writers (edition, dataset, run_id, host, pid) VALUES (%s, %s, %s, %s, %s)
            ON CONFLICT (edition, dataset) DO UPDATE SET
                run_id = EXCLUDED.run_id, host = EXCLUDED.host, pid = EXCLUDED.pid, since = now()
            """,
            (edition, dataset, run_id, socket.gethostname(), os.getpid()),
        )
    try:
        yield
    finally:
        if not connection.closed:
            with transaction(connection) as cursor:
                cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", (name,))


def still_only_writer(connection: Connection, *, edition: str, dataset: str, run_id: str) -> bool:
    """Take the right to write back on a new connection; False where somebody else has had it since ``only_writer``.

    Whoever takes the lock leaves a name in ``writers``: where ours still stands there, nobody had it in between.

    Raises:
        Retryable: the lock is held, perhaps by our own broken session, which the database has not noticed yet.
    """
    with transaction(connection) as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", (_lock_name(edition, dataset),))
        if cursor.fetchone() != (True,):
            holder = _writer_of(connection, edition=edition, dataset=dataset)
            raise Retryable(_refusal(holder, edition=edition, dataset=dataset))
        cursor.execute("SELECT run_id, host, pid FROM writers WHERE edition = %s AND dataset = %s", (edition, dataset))
        return bool(cursor.fetchone() == (run_id, socket.gethostname(), os.getpid()))


def list_writers(connection: Connection) -> list[Row]:
    """Who writes which data set now, with the latest figures that it reported (None before the first)."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT writers.*, metric.at, metric.figures
            FROM writers
            JOIN pg_locks ON locktype = 'advisory' AND objsubid = 1 AND granted
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND ((classid::bigint << 32) | objid::bigint)
                    = hashtextextended('aerie samples ' || edition || '/' || dataset, 0)
            LEFT JOIN LATERAL (
                SELECT at, figures FROM interval_metrics AS metric
                WHERE metric.edition = writers.edition AND metric.dataset = writers.dataset
                    AND metric.stage = 'generate' AND metric.at >= writers.since
                ORDER BY metric.at DESC LIMIT 1
            ) AS metric ON true
            ORDER BY edition, dataset
            """
        )
        return list(as_mappings(cursor))


def _lock_name(edition: str, dataset: str) -> str:
    return f"aerie samples {edition}/{dataset}"


def _writer_of(connection: Connection, *, edition: str, dataset: str) -> Mapping[str, object] | None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM writers WHERE edition = %s AND dataset = %s", (edition, dataset))
        return next(as_mappings(cursor), None)


def _refusal(holder: Mapping[str, object] | None, *, edition: str, dataset: str) -> str:
    who = "another process"
    if holder:
        since = f"{holder['since']:%Y-%m-%d %H:%M:%S %Z}"
        who = f"run {holder['run_id']} (process {holder['pid']} on {holder['host']}, since {since})"
    return f"{edition}/{dataset} is being written by {who}: wait until it ends, or stop it, before writing it again"
