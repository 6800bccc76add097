"""The corpus on disk: a Hugging Face data set in Arrow shards, and the token frequencies beside it.

``dataset/`` is what ``datasets.load_from_disk`` and speculators' ``ArrowDataset`` load unchanged. Ids are stored as
int32 and masks as int8, 5 bytes a token instead of 16: the torch format of ``datasets`` yields int64 for both.
Train rows come first, in shuffled order; validation rows are the tail, because speculators splits by position.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from aerie.errors import BadInput

DATASET_FOLDER = "dataset"
TOKEN_FREQUENCIES_FILE = "token_freq.pt"  # noqa: S105 - a file name
TOKEN_COUNTS_FILE = "token_counts.parquet"  # noqa: S105 - a file name
STATE_FILE = "state.json"
INFO_FILE = "dataset_info.json"
ROWS_PER_RECORD_BATCH = 1000

CORPUS_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("seq_len", pa.int32()),
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("dataset", pa.string()),
        ("source_revision", pa.string()),
        ("edition", pa.string()),
        ("licence", pa.string()),
        ("split", pa.string()),
    ]
)
TOKEN_COUNTS_SCHEMA = pa.schema([("dataset", pa.string()), ("token_id", pa.int32()), ("count", pa.int64())])

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CorpusRow:
    """One row: its position in the data set, ids int32 [S] and mask int8 [S], and where it comes from."""

    row: int
    sample_id: str
    dataset: str
    split: str
    input_ids: Int32Array
    loss_mask: npt.NDArray[np.int8]


class CorpusWriter:
    """Writer of the shards of one data set folder, in their final order.

    The folder is part of one that appears whole (``atomic_folder``), which is synced once for all of its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: list[str] = []

    def write_shard(self, table: pa.Table) -> Path:
        """Append ``table`` (of ``CORPUS_SCHEMA``) as the next shard; return its path."""
        return self.write_batches(table.to_batches(max_chunksize=ROWS_PER_RECORD_BATCH))

    def write_batches(self, batches: Iterable[pa.RecordBatch]) -> Path:
        """Append a shard of ``batches`` (of ``CORPUS_SCHEMA``) in Arrow's stream format; return its path."""
        path = self._folder / f"data-{len(self._shards):05d}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, CORPUS_SCHEMA) as writer:
            for batch in batches:
                writer.write_batch(batch)
        self._shards.append(path.name)
        return path

    def close(self, *, fingerprint: str) -> None:
        """Write what ``load_from_disk`` reads beside the shards: features, shard names, the torch format."""
        from datasets import DatasetInfo, Features

        DatasetInfo(features=Features.from_arrow_schema(CORPUS_SCHEMA)).write_to_directory(str(self._folder))
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._shards],
            "_fingerprint": fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        (self._folder / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")


def shard_paths(folder: Path) -> list[Path]:
    """Paths of the shards of the data set in ``folder``, in row order.

    Raises:
        BadInput: the folder holds no data set, or a shard is missing.
    """
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{folder}: no corpus here ({STATE_FILE} is missing); run merge first") from None
    paths = [folder / entry["filename"] for entry in state["_data_files"]]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise BadInput(f"{folder}: the corpus lacks the shards {', '.join(missing)}; run merge again")
    return paths


def iterate_batches(folder: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of the data set in ``folder``, in row order, memory-mapped."""
    for path in shard_paths(folder):
        with pa.memory_map(str(path), "r") as source, pa.ipc.open_stream(source) as reader:
            yield from reader


def iterate_rows(folder: Path) -> Iterator[CorpusRow]:
    """Yield the rows of the data set in ``folder``, in order."""
    row = 0
    for batch in iterate_batches(folder):
        ids, masks = batch.column("input_ids"), batch.column("loss_mask")
        names = batch.select(["sample_id", "dataset", "split"]).to_pylist()
        for position, name in enumerate(names):
            yield CorpusRow(
                row=row,
                input_ids=ids[position].values.to_numpy(),
                loss_mask=masks[position].values.to_numpy(),
                **name,
            )
            row += 1


def find_corpus_row(folder: Path, is_it: Callable[[pa.StringArray], int]) -> tuple[Path, CorpusRow] | None:
    """The first row that ``is_it`` finds, and its shard; ``is_it`` takes the sample ids of a record batch.

    ``is_it`` gives a position in the batch, or -1. The shards are mapped: of the rows before, only their ids are read.
    """
    first = 0
    for path in shard_paths(folder):
        with pa.memory_map(str(path), "r") as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                place = is_it(batch.column("sample_id"))
                if place >= 0:
                    return path, _row_at(batch, place, first + place)
                first += len(batch)
    return None


class CorpusRows:
    """The rows of the data set in ``folder`` by their position, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._batches = list(iterate_batches(folder))
        self._ends = list(accumulate(len(batch) for batch in self._batches))

    def __getitem__(self, row: int) -> CorpusRow:
        number = bisect_right(self._ends, row)
        batch = self._batches[number]
        return _row_at(batch, row - self._ends[number] + len(batch), row)


def _row_at(batch: pa.RecordBatch, position: int, row: int) -> CorpusRow:
    return CorpusRow(
        row=row,
        sample_id=batch["sample_id"][position].as_py(),
        dataset=batch["dataset"][position].as_py(),
        split=batch["split"][position].as_py(),
        input_ids=batch["input_ids"][position].values.to_numpy(),
        loss_mask=batch["loss_mask"][position].values.to_numpy(),
    )


def write_token_frequencies(folder: Path, counts: Mapping[str, Int64Array]) -> list[Path]:
    """Write the frequencies of response tokens (where the mask is 1), of the corpus and of each data set.

    ``token_freq.pt`` is what speculators reads, a ``dict[int, int]`` over the whole corpus; ``token_counts.parquet``
    holds the same by data set.

    Args:
        folder: the corpus folder, which appears whole (``atomic_folder``) and is synced once for all of its files.
        counts: data set to counts by token id, int64 [V].
    """
    import torch

    total = np.sum(list(counts.values()), axis=0)
    occurring = np.flatnonzero(total)
    frequencies = dict(zip(occurring.tolist(), total[occurring].tolist(), strict=True))
    torch.save(frequencies, folder / TOKEN_FREQUENCIES_FILE)
    names = sorted(counts)
    tokens = [np.flatnonzero(counts[name]) for name in names]
    table = pa.Table.from_arrays(
        [
            pa.array(names, pa.string()).take(pa.array(np.repeat(np.arange(len(names)), list(map(len, tokens))))),
            pa.array(np.concatenate(tokens), pa.int32()),
            pa.array(np.concatenate([counts[name][of] for name, of in zip(names, tokens, strict=True)])),
        ],
        schema=TOKEN_COUNTS_SCHEMA,
    )
    pq.write_table(table, folder / TOKEN_COUNTS_FILE)
    return [folder / TOKEN_FREQUENCIES_FILE, folder / TOKEN_COUNTS_FILE]


def read_token_counts(folder: Path) -> dict[str, dict[int, int]]:
    """Read the frequencies of response tokens: data set to token id to count."""
    table = pq.read_table(folder / TOKEN_COUNTS_FILE, schema=TOKEN_COUNTS_SCHEMA)
    counts: dict[str, dict[int, int]] = {}
    for dataset, token, count in zip(*(column.to_pylist() for column in table.columns), strict=True):
        counts.setdefault(dataset, {})[token] = count
    return counts


def train_data_ratio(train_rows: int, rows: int) -> float:
    """Ratio that makes speculators split after exactly ``train_rows`` rows.

    Its boundary is ``int(rows * ratio)``: half a row more keeps the product clear of rounding.
    """
    return 1.0 if train_rows == rows else (train_rows + 0.5) / rows
