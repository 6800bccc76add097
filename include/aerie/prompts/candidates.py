"""Prompts chosen but not yet rendered, on disk, so that memory stays flat and order depends on content alone.

A source is read once, in its own order; prompts are then taken in the order of their ranks. SQLite sorts on disk.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.sources.conversation import Message

_TABLE = """
CREATE TABLE candidates (
    rank INTEGER NOT NULL,
    row_hash TEXT NOT NULL,
    source_id TEXT,
    conversation_id TEXT NOT NULL,
    place TEXT NOT NULL,
    content TEXT NOT NULL
)
"""
# An id that two different rows carry identifies neither. Equal ranks mean equal prompts: any fixed order will do.
_IN_ORDER = """
SELECT rank, source_id, conversation_id, place, content,
       source_id IS NOT NULL AND source_id NOT IN (
           SELECT source_id FROM candidates WHERE source_id IS NOT NULL
           GROUP BY source_id HAVING count(DISTINCT row_hash) > 1
       )
FROM candidates ORDER BY rank, row_hash, source_id
"""


@dataclass(frozen=True)
class Candidate:
    """History whose answer is to be generated. ``row_hash`` is of the whole source row; ``where`` is for messages."""

    rank: int
    row_hash: str
    source_id: str | None
    conversation_id: str
    where: str
    history: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]


class Candidates:
    """The candidates of one data set; see ``open_candidates``."""

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
            "INSERT INTO candidates VALUES (?, ?, ?, ?, ?, ?)",
            (
                candidate.rank,
                candidate.row_hash,
                candidate.source_id,
                candidate.conversation_id,
                candidate.where,
                content,
            ),
        )
        self.added += 1

    def in_order(self) -> Iterator[Candidate]:
        """Yield all by rank; ``source_id`` is None where it is not unique in the source."""
        # Sorting an index moves keys alone; sorting rows would move every conversation through temporary files.
        self._connection.execute("CREATE INDEX by_rank ON candidates (rank, row_hash, source_id)")
        for rank, source_id, conversation_id, place, content, unique in self._connection.execute(_IN_ORDER):
            history, tools = json.loads(content)
            yield Candidate(rank, "", source_id if unique else None, conversation_id, place, history, tools)


@contextmanager
def open_candidates(path: Path) -> Iterator[Candidates]:
    """Yield an empty store at ``path``; the file is temporary and goes when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(path)) as connection:
            # Lost with the process anyway, so nothing needs to be durable.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(_TABLE)
            yield Candidates(connection)
    finally:
        path.unlink(missing_ok=True)
