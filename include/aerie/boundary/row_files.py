"""Rows of any file of responses: JSON lines, plain or compressed, or Parquet; what a file is, its first bytes say.

Memory holds a few rows, whatever the file's size. A row that cannot be read does not end the file: it comes with its
problem. What ends it (a file that is missing, damaged or cut short) is an error.
"""

import io
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic_core import from_json

from aerie.artefacts.parquet import open_parquet
from aerie.errors import BadInput

STANDARD_INPUT = Path("-")
ROWS_PER_BATCH = 64
LONGEST_LINE_BYTES = 64 << 20
READ_BYTES = 1 << 20

_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_PARQUET = b"PAR1"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

TokenArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class FileRow:
    """One row: ``number`` counts from 0, ``where`` names file and row for messages.

    Columns of integers come as arrays where the file has them so. ``problem``: the row cannot be read.
    """

    number: int
    where: str
    values: Mapping[str, Any]
    problem: str | None = None


def iterate_file(path: Path, columns: Sequence[str]) -> Iterator[FileRow]:
    """Yield the rows of ``path`` in their order; ``-`` is the standard input.

    Args:
        path: a file of JSON lines (also ``.gz`` or ``.zst``) or of Parquet.
        columns: those read from Parquet, where they are there.

    Raises:
        BadInput: the file cannot be opened, or not be read to its end; rows before that were yielded.
    """
    try:
        with _opened(path) as file:
            head = file.peek(len(_PARQUET))
            if head.startswith(_PARQUET):
                yield from _parquet_rows(path, file, columns)
            else:
                yield from _json_rows(path, file, head)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read{_to_its_end(error)}: {_reason(error)}") from error


def _opened(path: Path) -> io.BufferedReader:
    if path == STANDARD_INPUT:
        return io.BufferedReader(io.FileIO(sys.stdin.fileno(), closefd=False), READ_BYTES)
    return io.BufferedReader(io.FileIO(path), READ_BYTES)


def _to_its_end(error: Exception) -> str:
    opened = isinstance(error, OSError) and error.errno is not None
    return "" if opened else " to its end, it is damaged or cut short"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# JSON lines


def _json_rows(path: Path, file: io.BufferedReader, head: bytes) -> Iterator[FileRow]:
    for start, compression in _COMPRESSIONS.items():
        if head.startswith(start):
            # Arrow's reader, unlike others, tells a stream that is cut short from one that ends.
            stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression)
            file = io.BufferedReader(cast("Any", stream), READ_BYTES)
    number = 0
    for line_number, line in enumerate(_lines(file), start=1):
        if line is not None and line_number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line is None or not line.isspace():
            if number == 0:
                _refuse_array(path, line)
            yield _json_row(line, number, f"{path}, row {number} (line {line_number})")
            number += 1


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines, or None for one that is too long to be a row."""
    while line := file.readline(LONGEST_LINE_BYTES):
        if len(line) < LONGEST_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(READ_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield None


def _refuse_array(path: Path, first_line: bytes | None) -> None:
    if first_line and first_line.lstrip().startswith(b"["):
        raise BadInput(f"{path}: is one JSON array: expected one object a line; convert it with jq -c '.[]'")


def _json_row(line: bytes | None, number: int, where: str) -> FileRow:
    if line is None:
        return FileRow(number, where, {}, f"longer than {LONGEST_LINE_BYTES >> 20} MiB: too long to be a row")
    try:
        values = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        return FileRow(number, where, {}, f"not JSON: {error}")
    if not isinstance(values, dict):
        return FileRow(number, where, {}, f"expected a JSON object, found {_kind(values)}")
    return FileRow(number, where, values)


# Parquet


def _parquet_rows(path: Path, file: io.BufferedReader, columns: Sequence[str]) -> Iterator[FileRow]:
    if not file.seekable():
        raise BadInput(f"{path}: is Parquet, which is read from its end: name a file, not a pipe")
    with open_parquet(file) as parquet:
        present = [name for name in columns if name in parquet.schema_arrow.names]
        number = 0
        for batch in parquet.iter_batches(batch_size=ROWS_PER_BATCH, columns=present):
            rows = {name: _column(batch.column(name)) for name in present}
            for index in range(batch.num_rows):
                values = {name: column[index] for name, column in rows.items()}
                yield FileRow(number, f"{path}, row {number}", values)
                number += 1


def _column(column: Any) -> Sequence[Any]:
    """Values of a column: arrays that share its memory for lists of integers, Python's own for others."""
    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (listed and pa.types.is_integer(kind.value_type)) or column.flatten().null_count:
        values: Sequence[Any] = column.to_pylist()
        return values
    ids = column.values.to_numpy()
    offsets, valid = column.offsets.to_pylist(), column.is_valid().to_pylist()
    return [ids[start:stop] if there else None for start, stop, there in zip(offsets, offsets[1:], valid, strict=False)]


# Fields of a row


def token_ids(row: FileRow, name: str) -> TokenArray | list[int]:
    """Token ids of a row, an array [n], or a list where one does not fit into 64 bits.

    Raises:
        BadInput: the field is missing, or is something else than a list of integers.
    """
    if (ids := row.values.get(name)) is None:
        raise BadInput(f"{row.where}: has no {name}: expected a list of integers")
    if isinstance(ids, np.ndarray):
        return ids
    if not isinstance(ids, list):
        raise BadInput(f"{row.where}: expected {name} to be a list of integers, found {_kind(ids)}")
    try:
        array_of_ids = np.frombuffer(array("q", ids), dtype=np.int64)
    except OverflowError:
        array_of_ids = None
    except TypeError:
        raise _not_ids(row, name, ids) from None
    # true and false count as 1 and 0 in Python: only those, and lists that are no array, have to be looked at.
    suspects = ids if array_of_ids is None else [ids[at] for at in np.flatnonzero(array_of_ids >> 1 == 0).tolist()]
    if {*map(type, suspects)} - {int}:
        raise _not_ids(row, name, suspects)
    return ids if array_of_ids is None else array_of_ids


def _not_ids(row: FileRow, name: str, ids: Sequence[Any]) -> BadInput:
    wrong = next(item for item in ids if type(item) is not int)
    return BadInput(f"{row.where}: expected {name} to be a list of integers, found {_kind(wrong)} in it")


def count(row: FileRow, name: str, *, least: int) -> int | None:
    """A number of tokens, None where the row does not say.

    Raises:
        BadInput: it is not an integer, or too small.
    """
    value = row.values.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        # pandas makes a column of numbers with gaps one of fractions.
        value = int(value)
    if type(value) is not int or value < least:
        raise BadInput(f"{row.where}: expected {name} to be an integer of at least {least}, found {_shown(value)}")
    return value


def plain(value: Any) -> Any:
    """A value as JSON can hold it; what it cannot is written out."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value.hex() if isinstance(value, bytes) else str(value)


_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number with a fraction",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    return repr(value)[:80]
