"""``states.index.parquet``: one row a state file.

It stands for the files in the manifest: they are too big to hash.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from aerie.artefacts.parquet import iterate_rows, write_rows

INDEX_FILE = "states.index.parquet"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("token_ids_sha256", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class IndexedState:
    """One state file: its corpus row, path relative to the hidden-state folder, size, and the tokens it belongs to."""

    row: int
    sample_id: str
    file: str
    bytes: int
    tokens: int
    token_ids_sha256: str


def write_index(path: Path, states: Iterable[IndexedState]) -> int:
    """Write the index atomically, in the order given, and return its number of rows."""
    return write_rows(path, SCHEMA, (vars(state) for state in states))


def iterate_index(path: Path) -> Iterator[IndexedState]:
    """Yield the rows of the index.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    for row in iterate_rows(path, SCHEMA, written_by="capture"):
        yield IndexedState(**row)
