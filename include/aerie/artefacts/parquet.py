"""Streaming rows in and out of Parquet files of a fixed schema; the formats themselves are in their own modules."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aerie.artefacts.files import atomic_path
from aerie.errors import BadInput

ROWS_PER_GROUP = 1024
BUFFER_BYTES = 1 << 20


def open_parquet(source: Path | BinaryIO) -> pq.ParquetFile:
    """Open a file that is read page by page; as Arrow opens one by default, reading it ends up holding all of it.

    Raises:
        pa.ArrowInvalid: it is not Parquet, or a damaged one.
    """
    try:
        return pq.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not UTF-8: {error}") from error


def list_without_nulls(element: pa.DataType) -> pa.ListType:
    """Lists of ``element`` that hold no null: Arrow reads them in two thirds of the time that it takes for others."""
    return pa.list_(pa.field("element", element, nullable=False))


def has_columns(file: pq.ParquetFile, schema: pa.Schema) -> bool:
    """Whether the file has the columns of ``schema``; whether lists may hold nulls is not compared.

    Earlier files of samples do not say that theirs hold none.
    """
    found = file.schema_arrow
    return found.names == schema.names and all(
        of_file.nullable == field.nullable and _nullable_elements(of_file.type) == _nullable_elements(field.type)
        for of_file, field in zip(found, schema, strict=True)
    )


def _nullable_elements(column: pa.DataType) -> pa.DataType:
    return pa.list_(column.value_type) if pa.types.is_list(column) else column


class RowWriter:
    """Writer of rows one at a time, for a pass that writes several files; a row group is held in memory."""

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self._schema = schema
        self._group: list[Mapping[str, Any]] = []
        self.written = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._group.append(row)
        self.written += 1
        if len(self._group) == ROWS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the rows held in memory as a row group."""
        if self._group:
            self._writer.write_table(pa.Table.from_pylist(self._group, schema=self._schema))
            self._group = []


@contextmanager
def row_writer(path: Path, schema: pa.Schema) -> Iterator[RowWriter]:
    """Yield a writer of ``path``, which appears whole when the block ends well and not at all otherwise."""
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as parquet:
        writer = RowWriter(parquet, schema)
        yield writer
        writer.flush()


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write ``rows`` to ``path`` atomically, a row group at a time, and return how many there were."""
    with row_writer(path, schema) as writer:
        for row in rows:
            writer.write(row)
    return writer.written


def iterate_rows(path: Path, schema: pa.Schema, *, written_by: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that ``write_rows`` wrote, in order; memory holds one row group.

    Raises:
        BadInput: the file is missing, is not Parquet, or has other columns.
    """
    for batch in iterate_batches(path, schema, written_by=written_by):
        yield from batch.to_pylist()


def iterate_batches(
    path: Path, schema: pa.Schema, *, written_by: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows a row group at a time, as Arrow holds them; of some ``columns`` only where they are given.

    Raises:
        BadInput: the file is missing, is not Parquet, or has other columns.
    """
    if not path.is_file():
        raise BadInput(f"{path}: not there; run stage {written_by} first")
    try:
        with open_parquet(path) as file:
            if not has_columns(file, schema):
                raise BadInput(f"{path}: expected columns {_columns(schema)}; found {_columns(file.schema_arrow)}")
            yield from file.iter_batches(batch_size=ROWS_PER_GROUP, columns=columns)
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path}: not a Parquet file, or a damaged one: {error}") from error


def find_row(path: Path, schema: pa.Schema, sample_id: str, *, written_by: str) -> tuple[int, dict[str, Any]] | None:
    """The first row with this ``sample_id`` and its number; of the others only that column is read.

    Raises:
        BadInput: the file is missing, is not Parquet, or has other columns.
    """
    first = 0
    names = iterate_batches(path, schema, written_by=written_by, columns=["sample_id"])
    for batch in names:
        place = pc.index(batch.column("sample_id"), sample_id).as_py()
        if place >= 0:
            with open_parquet(path) as file:
                return first + place, _row(file, first + place)
        first += batch.num_rows
    return None


def _row(file: pq.ParquetFile, row: int) -> dict[str, Any]:
    first = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row < first + rows:
            found: dict[str, Any] = file.read_row_group(group).slice(row - first, 1).to_pylist()[0]
            return found
        first += rows
    raise IndexError(row)


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
