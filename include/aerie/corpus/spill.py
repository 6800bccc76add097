"""Rows set down on disk in partitions of the final order, so that memory never holds more than one of them.

A partition is three temporary files: ids as int32 and masks as int8, one row behind the other, and an Arrow file of
what else a row has. Tokens are moved as slices of arrays: Arrow's own ``take`` of lists is five times slower.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aerie.corpus.rows import TokenRows

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpilledRows:
    """Rows of one partition, in the order in which they came: ``about`` has a row each, with its ``seq_len``."""

    about: pa.Table
    tokens: TokenRows


class _PartitionWriter:
    def __init__(self, stem: Path, schema: pa.Schema) -> None:
        self._ids: BinaryIO = stem.with_suffix(".ids").open("wb")
        self._mask: BinaryIO = stem.with_suffix(".mask").open("wb")
        self._about: Any = pa.ipc.new_file(str(stem.with_suffix(".arrow")), schema)

    def write(self, about: pa.RecordBatch, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.int8]) -> None:
        self._ids.write(ids.data)
        self._mask.write(mask.data)
        self._about.write_batch(about)

    def close(self) -> None:
        for file in (self._ids, self._mask, self._about):
            file.close()


class Spill:
    """Writer and reader of partitions in ``folder``; ``schema`` is of what a row has beside its tokens."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._writers: dict[int, _PartitionWriter] = {}
        folder.mkdir(parents=True)

    def add(self, about: pa.RecordBatch, tokens: TokenRows, partitions: Int64Array) -> None:
        """Set down rows, of which there may be none, each in the partition given for it (int64 [n], ascending)."""
        names, begins = np.unique(partitions, return_index=True)
        bounds = pairwise([*begins.tolist(), len(partitions)])
        for name, (begin, end) in zip(names.tolist(), bounds, strict=True):
            if name not in self._writers:
                self._writers[name] = _PartitionWriter(self._stem(name), self._schema)
            first, last = tokens.offsets[begin], tokens.offsets[end]
            self._writers[name].write(about.slice(begin, end - begin), tokens.ids[first:last], tokens.mask[first:last])

    def partitions(self) -> Iterator[SpilledRows]:
        """Yield the partitions in their order, each removed when the next one is asked for."""
        for writer in self._writers.values():
            writer.close()
        for name in sorted(self._writers):
            stem = self._stem(name)
            with pa.memory_map(str(stem.with_suffix(".arrow"))) as source:
                about = pa.ipc.open_file(source).read_all()
                offsets = np.concatenate([[0], np.cumsum(about["seq_len"].to_numpy(), dtype=np.int64)])
                ids = np.frombuffer(_mapped(stem.with_suffix(".ids")), np.int32)
                mask = np.frombuffer(_mapped(stem.with_suffix(".mask")), np.int8)
                yield SpilledRows(about, TokenRows(ids=ids, mask=mask, offsets=offsets))
            for suffix in (".arrow", ".ids", ".mask"):
                stem.with_suffix(suffix).unlink()
        self._folder.rmdir()

    def _stem(self, partition: int) -> Path:
        return self._folder / f"partition-{partition}"


def _mapped(path: Path) -> pa.Buffer:
    with pa.memory_map(str(path)) as source:
        return source.read_buffer()
