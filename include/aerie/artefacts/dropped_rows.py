"""``dropped.parquet``: validated rows that are not in the corpus, and why.

Rows are named by their order key, the hash of the corpus' seed and their sample id (``aerie.corpus.rows.order_keys``):
an id is many times as long, and there can be as many as rows that stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aerie.errors import BadInput

DROPPED_FILE = "dropped.parquet"
SCHEMA = pa.schema(
    [
        pa.field("order_key", pa.uint64(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("same_as", pa.uint64()),
    ]
)


@dataclass(frozen=True)
class DroppedRow:
    """Why a row was dropped; ``same_as`` is the order key of the row that stays in its place, None where none does."""

    dataset: str
    reason: str
    same_as: int | None


def write_dropped_rows(
    path: Path,
    *,
    keys: npt.NDArray[np.uint64],
    datasets: Sequence[str],
    reasons: Sequence[str],
    same_as: npt.NDArray[np.uint64],
) -> int:
    """Write rows, one of each argument's a row, ``same_as`` 0 where there is none; return how many there were.

    ``path`` lies in a folder that appears whole (``atomic_folder``), which is synced once for all of its files.
    """
    columns = [pa.array(keys), pa.array(datasets, pa.string()), pa.array(reasons, pa.string())]
    columns.append(pa.array(same_as, mask=same_as == 0))
    table = pa.Table.from_arrays(columns, schema=SCHEMA).sort_by("order_key")
    pq.write_table(table, path, compression="zstd")
    return int(table.num_rows)


def find_dropped_row(path: Path, order_key: int) -> DroppedRow | None:
    """The row with this order key; None where it was not dropped.

    Raises:
        BadInput: the file is missing.
    """
    if not path.is_file():
        raise BadInput(f"{path}: not there; run merge again")
    found = pq.read_table(
        path, filters=pc.field("order_key") == pa.scalar(order_key, pa.uint64()), schema=SCHEMA
    ).to_pylist()
    return DroppedRow(found[0]["dataset"], found[0]["reason"], found[0]["same_as"]) if found else None
