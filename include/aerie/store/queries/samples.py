"""Samples of the ledger, a page at a time, and how long their responses are: for people, at any size of data set."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aerie.store.connection import Connection, transaction
from aerie.store.queries.ledger import State
from aerie.store.queries.rows import Row, as_mappings

Length = Literal["reasoning", "answer"]

EXCERPT_CHARACTERS = 160

_LENGTHS = "edition = %(edition)s AND dataset = %(dataset)s AND length = %(length)s AND samples > 0"


@dataclass(frozen=True)
class SampleFilter:
    """Which samples of a data set are wanted; None asks for all.

    ``finding`` is a reason or a flag, ``prefix`` how sample ids begin; ``decoded`` leaves those that have a preview.
    """

    state: State | None = None
    finding: str | None = None
    prefix: str | None = None
    decoded: bool = False


@dataclass(frozen=True)
class SamplePage:
    """One page of samples in the order of their ids; ``before`` and ``after`` say whether there are more."""

    rows: Sequence[Row]
    before: bool
    after: bool


def page_of_samples(
    connection: Connection,
    *,
    edition: str,
    dataset: str,
    wanted: SampleFilter,
    after: str | None = None,
    before: str | None = None,
    rows: int = 50,
) -> SamplePage:
    """The samples that follow id ``after``, or end before id ``before``, or the first ones.

    Each row says with ``decoded`` whether there is a preview, and with ``excerpt`` how its response begins.
    """
    backwards = before is not None and after is None
    conditions = ["edition = %(edition)s", "dataset = %(dataset)s"]
    if wanted.state:
        conditions.append("state = %(state)s")
    if wanted.finding:
        # The first half is what the index of samples with findings covers.
        conditions.append("(reasons <> '{}' OR flags <> '{}')")
        conditions.append("(%(finding)s = ANY(reasons) OR %(finding)s = ANY(flags))")
    if wanted.prefix:
        conditions.append("sample_id LIKE %(pattern)s")
    if wanted.decoded:
        conditions.append(
            "sample_id IN (SELECT sample_id FROM previews WHERE edition = %(edition)s AND dataset = %(dataset)s)"
        )
    if after is not None:
        conditions.append("sample_id > %(after)s")
    if before is not None:
        conditions.append("sample_id < %(before)s")
    with transaction(connection) as cursor:
        # Which ids stand on the page is told by an index alone; only then are rows and previews read.
        # One row more than asked for tells whether there are others.
        cursor.execute(
            f"""
            WITH page AS MATERIALIZED (
                SELECT edition, dataset, sample_id FROM samples WHERE {" AND ".join(conditions)}
                ORDER BY sample_id {"DESC" if backwards else "ASC"} LIMIT %(rows)s + 1
            )
            SELECT samples.*, previews.sample_id IS NOT NULL AS decoded, (
                SELECT left(span ->> 1, {EXCERPT_CHARACTERS})
                FROM jsonb_array_elements(previews.document -> 'spans') WITH ORDINALITY AS spans (span, place)
                WHERE span ->> 0 NOT IN ('prompt', 'boundary') ORDER BY place LIMIT 1
            ) AS excerpt
            FROM page JOIN samples USING (edition, dataset, sample_id)
                LEFT JOIN previews USING (edition, dataset, sample_id) ORDER BY sample_id
            """,  # noqa: S608 - our own words
            {
                "edition": edition,
                "dataset": dataset,
                "state": wanted.state,
                "finding": wanted.finding,
                "pattern": _pattern(wanted.prefix or ""),
                "after": after,
                "before": before,
                "rows": rows,
            },
        )
        found = list(as_mappings(cursor))
    more = len(found) > rows
    if backwards:
        return SamplePage(found[-rows:], before=more, after=True)
    return SamplePage(found[:rows], before=after is not None, after=more)


def _pattern(prefix: str) -> str:
    """What begins with ``prefix``, whose own ``%`` and ``_`` stand for themselves."""
    return re.sub(r"([\\%_])", r"\\\1", prefix) + "%"


def read_sample(connection: Connection, *, edition: str, dataset: str, sample_id: str) -> Row | None:
    """One sample with its ``preview`` (None where it was not decoded), or None where the ledger has no such sample."""
    with transaction(connection) as cursor:
        cursor.execute(
            """
            SELECT samples.*, previews.document AS preview, previews.source, previews.loaded_at
            FROM samples LEFT JOIN previews USING (edition, dataset, sample_id)
            WHERE edition = %s AND dataset = %s AND sample_id = %s
            """,
            (edition, dataset, sample_id),
        )
        return next(as_mappings(cursor), None)


@dataclass(frozen=True)
class LengthFigures:
    """Tokens of the judged responses of a data set; None where there are none."""

    responses: int
    median: int | None
    ninetieth: int | None
    ninety_ninth: int | None
    longest: int | None


def measure_lengths(connection: Connection, *, edition: str, dataset: str, length: Length) -> LengthFigures:
    """Percentiles of reasoning tokens, or of all the others ("answer"), over kept and quarantined responses."""
    with transaction(connection) as cursor:
        cursor.execute(
            f"""
            WITH counted AS (
                SELECT tokens, sum(sum(samples)) OVER (ORDER BY tokens) AS up_to, sum(sum(samples)) OVER () AS responses
                FROM sample_lengths WHERE {_LENGTHS} GROUP BY tokens
            )
            SELECT max(responses)::bigint, min(tokens) FILTER (WHERE up_to >= 0.5 * responses),
                   min(tokens) FILTER (WHERE up_to >= 0.9 * responses),
                   min(tokens) FILTER (WHERE up_to >= 0.99 * responses), max(tokens)
            FROM counted
            """,  # noqa: S608 - our own words
            {"edition": edition, "dataset": dataset, "length": length},
        )
        responses, *others = cursor.fetchone() or (0, None, None, None, None)
    return LengthFigures(responses or 0, *others)


def count_lengths(
    connection: Connection, *, edition: str, dataset: str, length: Length, width: int, bars: int
) -> dict[State, list[int]]:
    """How many responses have 0 to ``width`` - 1 tokens, ``width`` to twice that less one, ..., by state.

    There are ``bars`` of them, and a last one for everything longer.
    """
    with transaction(connection) as cursor:
        cursor.execute(
            f"""
            SELECT state, least(tokens / %(width)s, %(bars)s) AS bar, sum(samples)::bigint FROM sample_lengths
            WHERE {_LENGTHS} GROUP BY 1, 2
            """,  # noqa: S608 - our own words
            {"edition": edition, "dataset": dataset, "length": length, "width": width, "bars": bars},
        )
        counts: dict[State, list[int]] = {"kept": [0] * (bars + 1), "quarantined": [0] * (bars + 1)}
        for state, bar, count in cursor:
            counts[state][bar] = count
    return counts
