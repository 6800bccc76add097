"""``states.index.parquet``: one row a state file.

It stands for the files in the manifest: they are too big to hash. ``states.index.<rank>-of-<world size>.parquet`` has
the rows that one rank captured, and what was measured of them, until they are merged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from aerie.artefacts.parquet import find_row, iterate_rows, write_rows

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
SHARD_SCHEMA = SCHEMA.append(pa.field("dataset", pa.string(), nullable=False)).append(
    pa.field("rms", pa.list_(pa.float64()), nullable=False)
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


@dataclass(frozen=True)
class MeasuredState(IndexedState):
    """A state file as it was checked: also its data set, and by slot [L] its root mean square (``check``)."""

    dataset: str
    rms: tuple[float, ...]


def shard_index(folder: Path, rank: int, world_size: int) -> Path:
    """Path of a rank's index in the folder of hidden states."""
    return folder / f"states.index.{rank}-of-{world_size}.parquet"


def write_shard_index(path: Path, states: Iterable[MeasuredState]) -> int:
    """Write a rank's index atomically, and return its number of rows."""
    return write_rows(path, SHARD_SCHEMA, (vars(state) for state in states))


def iterate_shard_index(path: Path) -> Iterator[MeasuredState]:
    """Yield the rows of a rank's index.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    for row in iterate_rows(path, SHARD_SCHEMA, written_by="capture"):
        yield MeasuredState(**{**row, "rms": tuple(row["rms"])})


def find_state(path: Path, sample_id: str) -> IndexedState | None:
    """The state file of a sample; raises as ``iterate_index`` does."""
    found = find_row(path, SCHEMA, sample_id, written_by="capture")
    return IndexedState(**found[1]) if found else None
