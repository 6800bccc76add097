"""``samples.parquet``: the rows that a data set contributes to training, and ``verdicts.parquet``: why each was kept.

Both are written in one pass over a data set's responses, so their writers take rows one at a time.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from aerie.artefacts.parquet import (
    ROWS_PER_GROUP,
    RowWriter,
    find_row,
    has_columns,
    iterate_rows,
    list_without_nulls,
    open_parquet,
    row_writer,
)
from aerie.artefacts.prompts import Split
from aerie.errors import BadInput

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("input_ids", list_without_nulls(pa.int32()), nullable=False),
        pa.field("loss_mask", list_without_nulls(pa.int8()), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("response_tokens", pa.int32(), nullable=False),
        pa.field("reasoning_tokens", pa.int32(), nullable=False),
        pa.field("flags", pa.list_(pa.string()), nullable=False),
        pa.field("source_revision", pa.string()),
        pa.field("edition", pa.string(), nullable=False),
        pa.field("licence", pa.string(), nullable=False),
    ]
)

VERDICT_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("verdict", pa.string(), nullable=False),
        pa.field("reasons", pa.list_(pa.string()), nullable=False),
        pa.field("flags", pa.list_(pa.string()), nullable=False),
        pa.field("positions", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        pa.field("reasoning_tokens", pa.int32(), nullable=False),
        pa.field("answer_tokens", pa.int32(), nullable=False),
        pa.field("tool_calls", pa.int32(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One kept row.

    ``input_ids`` [S] is prompt and response, exactly as the server saw and produced them; ``loss_mask`` [S] is 1 on
    what is trained on. ``prompt_tokens`` and ``response_tokens`` count its zeros and ones.
    """

    sample_id: str
    conversation_id: str
    dataset: str
    split: Split
    input_ids: Sequence[int] | NDArray[np.integer[Any]]
    loss_mask: Sequence[int] | NDArray[np.integer[Any]]
    prompt_tokens: int
    response_tokens: int
    reasoning_tokens: int
    flags: Sequence[str]
    source_revision: str | None
    edition: str
    licence: str


@dataclass(frozen=True)
class VerdictRow:
    """The verdict on one response; ``positions`` gives for each reason and flag the indices of the tokens to blame.

    They index the response of a generated row, and ``input_ids`` of a row that came already tokenised.
    """

    sample_id: str
    verdict: Literal["kept", "quarantined"]
    reasons: Sequence[str]
    flags: Sequence[str]
    positions: Mapping[str, Sequence[int]]
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    tool_calls: int


class SampleWriter:
    """Writer of samples one at a time."""

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows

    @property
    def written(self) -> int:
        """Rows written so far."""
        return self._rows.written

    def write(self, sample: Sample) -> None:
        """Append one sample."""
        self._rows.write(vars(sample))


class VerdictWriter:
    """Writer of verdicts one at a time."""

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows

    @property
    def written(self) -> int:
        """Rows written so far."""
        return self._rows.written

    def write(self, row: VerdictRow) -> None:
        """Append one verdict."""
        positions = {name: list(at) for name, at in row.positions.items()}
        self._rows.write({**vars(row), "positions": json.dumps(positions)})


@contextmanager
def sample_writer(path: Path) -> Iterator[SampleWriter]:
    """Yield a writer of ``path``, which appears whole when the block ends well and not at all otherwise."""
    with row_writer(path, SAMPLE_SCHEMA) as rows:
        yield SampleWriter(rows)


@contextmanager
def verdict_writer(path: Path) -> Iterator[VerdictWriter]:
    """Yield a writer of ``path``, which appears whole when the block ends well and not at all otherwise."""
    with row_writer(path, VERDICT_SCHEMA) as rows:
        yield VerdictWriter(rows)


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Write samples to ``path`` atomically and return how many there were."""
    with sample_writer(path) as writer:
        for sample in samples:
            writer.write(sample)
    return writer.written


def write_verdicts(path: Path, rows: Iterable[VerdictRow]) -> int:
    """Write verdicts to ``path`` atomically and return how many there were."""
    with verdict_writer(path) as writer:
        for row in rows:
            writer.write(row)
    return writer.written


def iterate_samples(path: Path) -> Iterator[Sample]:
    """Yield samples in file order.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    for row in iterate_rows(path, SAMPLE_SCHEMA, written_by="validate"):
        yield Sample(**row)


def iterate_verdicts(path: Path) -> Iterator[VerdictRow]:
    """Yield verdicts in file order.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    for row in iterate_rows(path, VERDICT_SCHEMA, written_by="validate"):
        yield VerdictRow(**{**row, "positions": json.loads(row["positions"])})


def find_sample(path: Path, sample_id: str) -> tuple[int, Sample] | None:
    """A sample and its row number, without reading the tokens of others; raises as ``iterate_samples`` does."""
    found = find_row(path, SAMPLE_SCHEMA, sample_id, written_by="validate")
    return (found[0], Sample(**found[1])) if found else None


def find_verdict(path: Path, sample_id: str) -> VerdictRow | None:
    """The verdict on a sample's response; raises as ``iterate_verdicts`` does."""
    found = find_row(path, VERDICT_SCHEMA, sample_id, written_by="validate")
    return VerdictRow(**{**found[1], "positions": json.loads(found[1]["positions"])}) if found else None


def iterate_sample_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield samples as record batches of ``SAMPLE_SCHEMA`` (or of some ``columns``), in file order.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    with _open_samples(path) as file:
        yield from file.iter_batches(batch_size=ROWS_PER_GROUP, columns=columns)


def count_rows(path: Path) -> int:
    """Rows, from what the file says of itself.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    with _open_samples(path) as file:
        return int(file.metadata.num_rows)


def count_tokens(path: Path) -> int:
    """Tokens of all rows, prompts included, from two columns of numbers.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    with _open_samples(path) as file:
        table = file.read(columns=["prompt_tokens", "response_tokens"])
    return sum(int(table[name].to_numpy().sum()) for name in table.column_names)


@contextmanager
def _open_samples(path: Path) -> Iterator[pq.ParquetFile]:
    if not path.is_file():
        raise BadInput(f"{path}: not there; run stage validate first")
    try:
        with open_parquet(path) as file:
            if not has_columns(file, SAMPLE_SCHEMA):
                raise BadInput(f"{path}: not a file of samples of this version; run stage validate again")
            yield file
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path}: not a Parquet file, or a damaged one: {error}") from error
