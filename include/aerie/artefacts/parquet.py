"""Streaming rows in and out of Parquet files of a fixed schema; the formats themselves are in their own modules."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aerie.artefacts.files import atomic_path
from aerie.errors import BadInput

ROWS_PER_GROUP = 1024


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write ``rows`` to ``path`` atomically, a row group at a time, and return how many there were."""
    remaining = iter(rows)
    written = 0
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while group := list(islice(remaining, ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            written += len(group)
    return written


def iterate_rows(path: Path, schema: pa.Schema, *, written_by: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that ``write_rows`` wrote, in order; memory holds one row group.

    Raises:
        BadInput: the file is missing, is not Parquet, or has other columns.
    """
    if not path.is_file():
        raise BadInput(f"{path}: not there; run stage {written_by} first")
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(schema):
                raise BadInput(f"{path}: expected columns {_columns(schema)}; found {_columns(file.schema_arrow)}")
            for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path}: not a Parquet file, or a damaged one: {error}") from error


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
