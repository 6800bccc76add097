"""Prompts chosen but not yet rendered, on disk, so that memory stays flat and order depends on content alone.

A source is read once, in its own order; prompts are then taken in the order of their ranks, a part at a time, by any
number of processes. SQLite sorts on disk.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.sources.conversation import Message

PART_CANDIDATES = 2000
_TABLE = """
CREATE TABLE candidates (
    rank INTEGER NOT NULL,
    row_hash TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    source_id TEXT,
    conversation_id TEXT NOT NULL,
    place TEXT NOT NULL,
    content TEXT NOT NULL
)
"""
# An id that two different rows carry identifies neither. Equal ranks mean equal prompts: any fixed order will do.
_ORDER = (
    "CREATE INDEX by_rank ON candidates (rank, row_hash, source_id, place)",
    """
    CREATE TABLE shared_ids AS SELECT source_id FROM candidates WHERE source_id IS NOT NULL
    GROUP BY source_id HAVING count(DISTINCT row_hash) > 1
    """,
    "CREATE INDEX by_id ON shared_ids (source_id)",
    """
    CREATE TABLE positions AS
    SELECT rowid AS candidate, row_number() OVER (ORDER BY rank, row_hash, source_id, place) - 1 AS position
    FROM candidates
    """,
    "CREATE UNIQUE INDEX by_position ON positions (position)",
)
_PART = """
SELECT rank, CASE WHEN source_id IN (SELECT source_id FROM shared_ids) THEN NULL ELSE source_id END,
       conversation_id, place, content, row_hash, content_hash
FROM positions JOIN candidates ON candidates.rowid = positions.candidate
WHERE position >= ? AND position < ? ORDER BY position
"""


@dataclass(frozen=True)
class Candidate:
    """History whose answer is to be generated.

    ``row_hash`` is of the whole source row, ``content_hash`` of history and tools; ``where`` is for messages.
    """

    rank: int
    row_hash: str
    content_hash: str
    source_id: str | None
    conversation_id: str
    where: str
    history: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]


class Candidates:
    """Candidates as they are collected; see ``new_candidates``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.added = 0

    def add(self, candidate: Candidate) -> None:
        """Keep one candidate.

        Raises:
            UnicodeEncodeError: a text holds half of a surrogate pair.
        """
        content = json.dumps([candidate.history, candidate.tools], ensure_ascii=False)
        self._connection.execute(
            "INSERT INTO candidates VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                candidate.rank,
                candidate.row_hash,
                candidate.content_hash,
                candidate.source_id,
                candidate.conversation_id,
                candidate.where,
                content,
            ),
        )
        self.added += 1

    def sort(self) -> None:
        """Give every candidate its position, after the last was added."""
        for statement in _ORDER:
            self._connection.execute(statement)


@contextmanager
def new_candidates(path: Path) -> Iterator[Candidates]:
    """Yield an empty store in a new file at ``path``, which is sorted and on disk when the block has ended well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        # A file that was not finished is made anew, so that nothing needs to be durable before its end.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(_TABLE)
        candidates = Candidates(connection)
        yield candidates
        candidates.sort()
        connection.commit()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_part(path: Path, part: int) -> Iterator[Candidate]:
    """Yield part ``part``, in order: ``PART_CANDIDATES`` candidates; their ``source_id`` is None unless unique."""
    begin = part * PART_CANDIDATES
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        for rank, source_id, conversation_id, place, content, row_hash, content_hash in connection.execute(
            _PART, (begin, begin + PART_CANDIDATES)
        ):
            history, tools = json.loads(content)
            yield Candidate(rank, row_hash, content_hash, source_id, conversation_id, place, history, tools)
