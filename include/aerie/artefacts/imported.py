"""``imported.parquet``: rows that arrived already tokenised (the A-series), checked but not yet judged."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from aerie.artefacts.parquet import find_row, iterate_rows, write_rows
from aerie.artefacts.prompts import Split

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
    ]
)


@dataclass(frozen=True)
class ImportedRow:
    """One tokenised row: ``input_ids`` and ``loss_mask`` of equal length; the mask is 1 on what is trained on."""

    sample_id: str
    conversation_id: str
    split: Split
    input_ids: list[int]
    loss_mask: list[int]


def write_imported(path: Path, rows: Iterable[ImportedRow]) -> int:
    """Write rows to ``path`` atomically, in the order given, and return how many there were."""
    return write_rows(path, SCHEMA, (vars(row) for row in rows))


def iterate_imported(path: Path) -> Iterator[ImportedRow]:
    """Yield rows in file order.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    for row in iterate_rows(path, SCHEMA, written_by="import"):
        yield ImportedRow(**row)


def find_imported(path: Path, sample_id: str) -> tuple[int, ImportedRow] | None:
    """A row and its number, without reading the tokens of others; raises as ``iterate_imported`` does."""
    found = find_row(path, SCHEMA, sample_id, written_by="import")
    return (found[0], ImportedRow(**found[1])) if found else None
