"""Samples of the ledger, a page at a time, and how long their responses are: for people, at any size of data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aerie.store.connection import Connection, transaction
from aerie.store.queries.ledger import State
from aerie.store.queries.rows import Row, as_mappings

Length = Literal["reasoning", "answer"]

EXCERPT_CHARACTERS = 160

_LENGTHS = {"reasoning": "reasoning_tokens", "answer": "completion_tokens - reasoning_tokens"}
_JUDGED = "edition = %(edition)s AND dataset = %(dataset)s AND state IN ('kept', 'quarantined')"


@dataclass(frozen=True)
class SampleFilter:
    """Which samples of a data set are wanted; None asks for all.

    ``finding`` is a reason or a flag, ``part`` any part of a sample id; ``decoded`` leaves those that have a preview.
    """

    state: State | None = None
    finding: str | None = None
    part: str | None = None
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
    with transaction(connection) as cursor:
        # The page is cut before previews are looked at. One row more than asked for tells whether there are others.
        cursor.execute(
            f"""
            WITH page AS MATERIALIZED (
                SELECT * FROM samples WHERE edition = %(edition)s AND dataset = %(dataset)s
                    AND (%(state)s IS NULL OR state = %(state)s)
                    AND (%(finding)s IS NULL OR (reasons <> '{{}}' OR flags <> '{{}}')
                        AND (%(finding)s = ANY(reasons) OR %(finding)s = ANY(flags)))
                    AND (%(part)s IS NULL OR strpos(sample_id, %(part)s) > 0)
                    AND (NOT %(decoded)s OR sample_id IN (
                        SELECT sample_id FROM previews WHERE edition = %(edition)s AND dataset = %(dataset)s))
                    AND (%(after)s IS NULL OR sample_id > %(after)s)
                    AND (%(before)s IS NULL OR sample_id < %(before)s)
                ORDER BY sample_id {"DESC" if backwards else "ASC"} LIMIT %(rows)s + 1
            )
            SELECT page.*, previews.sample_id IS NOT NULL AS decoded, (
                SELECT left(span ->> 1, {EXCERPT_CHARACTERS})
                FROM jsonb_array_elements(previews.document -> 'spans') WITH ORDINALITY AS spans (span, place)
                WHERE span ->> 0 <> 'prompt' ORDER BY place LIMIT 1
            ) AS excerpt
            FROM page LEFT JOIN previews USING (edition, dataset, sample_id) ORDER BY sample_id
            """,  # noqa: S608 - our own words
            {
                "edition": edition,
                "dataset": dataset,
                "state": wanted.state,
                "finding": wanted.finding,
                "part": wanted.part,
                "decoded": wanted.decoded,
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
    """Tokens of the judged responses of a data set; None where there are none.."""

    responses: int
    median: int | None
    ninetieth: int | None
    ninety_ninth: int | None
    longest: int | None


def measure_lengths(connection: Connection, *, edition: str, dataset: str, length: Length) -> LengthFigures:
    """Percentiles of reasoning tokens, or of all the others ("answer"), over kept and quarantined responses."""
    tokens = _LENGTHS[length]
    with transaction(connection) as cursor:
        cursor.execute(
            f"""
            SELECT count(tokens), percentile_disc(ARRAY[0.5, 0.9, 0.99]) WITHIN GROUP (ORDER BY tokens), max(tokens)
            FROM (SELECT {tokens} AS tokens FROM samples WHERE {_JUDGED}) AS judged
            """,  # noqa: S608 - our own words
            {"edition": edition, "dataset": dataset},
        )
        responses, percentiles, longest = cursor.fetchone() or (0, None, None)
    median, ninetieth, ninety_ninth = percentiles or (None, None, None)
    return LengthFigures(responses, median, ninetieth, ninety_ninth, longest)


def count_lengths(
    connection: Connection, *, edition: str, dataset: str, length: Length, width: int, bars: int
) -> dict[State, list[int]]:
    """How many responses have 0 to ``width`` - 1 tokens, ``width`` to twice that less one, ..., by state.

    There are ``bars`` of them, and a last one for everything longer.
    """
    tokens = _LENGTHS[length]
    with transaction(connection) as cursor:
        cursor.execute(
            f"""
            SELECT state, least(({tokens}) / %(width)s, %(bars)s) AS bar, count(*) FROM samples
            WHERE {_JUDGED} AND ({tokens}) IS NOT NULL GROUP BY 1, 2
            """,  # noqa: S608 - our own words
            {"edition": edition, "dataset": dataset, "width": width, "bars": bars},
        )
        counts: dict[State, list[int]] = {"kept": [0] * (bars + 1), "quarantined": [0] * (bars + 1)}
        for state, bar, count in cursor:
            counts[state][bar] = count
    return counts
