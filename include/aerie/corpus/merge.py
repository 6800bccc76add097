"""Merging validated data sets into one shuffled training set, in bounded memory.

Every row gets an order key, the hash of seed and sample id: the permutation depends on nothing else, not on the order
of files, the number of shards or an interruption. Rows are spilled into partitions by key, then each partition is
sorted and becomes one shard, so that memory holds one partition and a few numbers a row.

Equal prompts of different data sets are found here, not before generation: data sets are prepared and generated at
different times, also in different runs, and only when all are there does it depend on nothing else which one stays.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aerie.artefacts.corpus import CORPUS_SCHEMA, CorpusWriter, Int64Array
from aerie.artefacts.samples import count_tokens, iterate_sample_batches
from aerie.corpus.equal_prompts import PromptHashes
from aerie.corpus.rows import SPLITS, Origin, check_rows, order_keys, split_codes
from aerie.errors import Failed

TRAIN, VALIDATION, BENCHMARK = (SPLITS.index(name) for name in ("train", "validation", "benchmark"))
TOKENS_PER_PARTITION = 10_000_000
SPILL_KEYS = ("order_key", "content_0", "content_1")
SPILL_SCHEMA = pa.schema([*CORPUS_SCHEMA, *(pa.field(name, pa.uint64()) for name in SPILL_KEYS)])
TOO_LONG, DUPLICATE, HELD_OUT, COPY_OF_HELD_OUT = "too_long", "duplicate", "held_out", "copy_of_held_out"


@dataclass(frozen=True)
class Source:
    """Samples of one validated data set, and the hashes of its prompts, if it was prepared from text."""

    dataset: str
    samples: Path
    prompt_hashes: Path


@dataclass
class DatasetCounts:
    """What was kept of one data set."""

    rows: int = 0
    tokens: int = 0
    response_tokens: int = 0
    longest_row_tokens: int = 0


@dataclass
class Merged:
    """What a merge wrote; ``frequencies`` are counts of response tokens by id, int64 [V], by data set."""

    fingerprint: str
    shards: list[tuple[Path, int]]
    train_rows: int
    validation_rows: int
    datasets: Mapping[str, DatasetCounts]
    dropped: Mapping[str, int]
    frequencies: Mapping[str, Int64Array]

    @property
    def counts(self) -> dict[str, Any]:
        """Counts for the manifest."""
        kept = self.datasets.values()
        total = np.sum(list(self.frequencies.values()), axis=0)
        return {
            "corpus_fingerprint": self.fingerprint,
            "rows": self.train_rows + self.validation_rows,
            "train_rows": self.train_rows,
            "validation_rows": self.validation_rows,
            "tokens": sum(counts.tokens for counts in kept),
            "response_tokens": sum(counts.response_tokens for counts in kept),
            "longest_row_tokens": max(counts.longest_row_tokens for counts in kept),
            "distinct_tokens": int(np.count_nonzero(total)),
            "datasets": {name: vars(counts) for name, counts in self.datasets.items()},
            "dropped": dict(self.dropped),
        }


@dataclass
class RowTable:
    """A few numbers a row, for deduplication: one array a batch until ``joined``.

    Two rows are the same if they answer the same prompt, which only rows of different data sets can, since ``prepare``
    takes a prompt once; rows that arrive tokenised, if their ids and masks are.
    """

    keys: list[npt.NDArray[np.uint64]] = field(default_factory=lambda: [np.empty(0, np.uint64)])
    contents: list[npt.NDArray[np.uint64]] = field(default_factory=lambda: [np.empty((0, 2), np.uint64)])
    splits: list[npt.NDArray[np.int8]] = field(default_factory=lambda: [np.empty(0, np.int8)])
    datasets: list[npt.NDArray[np.int16]] = field(default_factory=lambda: [np.empty(0, np.int16)])
    held_out: list[npt.NDArray[np.uint64]] = field(default_factory=lambda: [np.empty((0, 2), np.uint64)])

    def add(
        self,
        keys: npt.NDArray[np.uint64],
        contents: npt.NDArray[np.uint64],
        splits: npt.NDArray[np.int8],
        dataset: int,
    ) -> None:
        """Add rows of the data set with this number: order keys [n], hashes of content [n, 2], splits [n]."""
        self.keys.append(keys)
        self.contents.append(contents)
        self.splits.append(splits)
        self.datasets.append(np.full(len(keys), dataset, np.int16))

    def duplicates(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Order keys of the rows to drop, and which of them are copies of a held-out row.

        Of rows with the same content the one in the most precious split stays, then that of the first data set.
        Prompts that are ``held_out``, for which there are no rows, come before all.
        """
        held_out = np.concatenate(self.held_out)
        keys = np.concatenate([np.zeros(len(held_out), np.uint64), *self.keys])
        contents = np.concatenate([held_out, *self.contents])
        splits = np.concatenate([np.full(len(held_out), BENCHMARK, np.int8), *self.splits])
        datasets = np.concatenate([np.full(len(held_out), -1, np.int16), *self.datasets])
        order = np.lexsort((keys, datasets, splits, contents[:, 1], contents[:, 0]))
        repeats = np.zeros(len(order), bool)
        repeats[1:] = (contents[order][1:] == contents[order][:-1]).all(axis=1)
        firsts = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))
        dropped = repeats & (splits[order] != BENCHMARK)
        copies = splits[order][firsts] < splits[order]
        return keys[order][dropped], copies[dropped]

    def check_sample_ids(self, sources: Sequence[Source]) -> None:
        """Refuse two rows with one sample id.

        Raises:
            Failed: naming the data sets.
        """
        keys, datasets = np.concatenate(self.keys), np.concatenate(self.datasets)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        if len(same):
            first, second = (sources[datasets[order[same[0] + i]]] for i in (0, 1))
            raise Failed(
                f"{len(same)} sample ids occur twice, first in {first.samples} and {second.samples}: a sample id must "
                "name one prompt of one data set; validate both again"
            )


class Partitions:
    """Rows spilled by order key, train rows before validation rows."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self._folder = folder
        self._partitions = partitions
        self._writers: dict[int, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        batch: pa.RecordBatch,
        rows: Int64Array,
        splits: npt.NDArray[np.int8],
        keys: npt.NDArray[np.uint64],
    ) -> None:
        """Spill the ``rows`` of ``batch``, with their splits (train or validation) and order keys."""
        slices = np.minimum((keys / 2.0**64 * self._partitions).astype(np.int64), self._partitions - 1)
        partitions = slices + np.where(splits == VALIDATION, self._partitions, 0)
        for partition in np.unique(partitions).tolist():
            if partition not in self._writers:
                self._writers[partition] = pa.ipc.new_file(str(self._path(partition)), SPILL_SCHEMA)
            self._writers[partition].write_batch(batch.take(pa.array(rows[partitions == partition])))

    def sorted_tables(self, dropped: npt.NDArray[np.uint64]) -> Iterator[pa.Table]:
        """Yield the rows of each partition in the corpus' final order, without those whose key is ``dropped``."""
        for writer in self._writers.values():
            writer.close()
        for partition in sorted(self._writers):
            path = self._path(partition)
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
                keys = table[SPILL_KEYS[0]].to_numpy()
                order = np.argsort(keys, kind="stable")
                yield table.take(pa.array(order[~np.isin(keys[order], dropped)])).combine_chunks()
            path.unlink()

    def _path(self, partition: int) -> Path:
        return self._folder / f"partition-{partition}.arrow"


class Tally:
    """Counts, token frequencies and fingerprint of the rows that are written, in one pass."""

    def __init__(self, datasets: Sequence[str], vocabulary_size: int) -> None:
        self.counts = {dataset: DatasetCounts() for dataset in datasets}
        self.frequencies = {dataset: np.zeros(vocabulary_size, np.int64) for dataset in datasets}
        self.rows = {"train": 0, "validation": 0}
        self._digest = hashlib.sha256()

    def add(self, table: pa.Table) -> None:
        """Count one sorted partition, whose rows share a split."""
        self.rows[table["split"][0].as_py()] += table.num_rows
        self._digest.update(np.stack([table[name].to_numpy() for name in SPILL_KEYS], axis=1).tobytes())
        datasets = np.array(table["dataset"].to_pylist())
        lengths = table["seq_len"].to_numpy()
        ids, mask = (_values(table[name]) for name in ("input_ids", "loss_mask"))
        for dataset in np.unique(datasets).tolist():
            rows = datasets == dataset
            tokens = np.repeat(rows, lengths)
            trained = ids[tokens & (mask == 1)]
            self.frequencies[dataset] += np.bincount(trained, minlength=len(self.frequencies[dataset]))
            counts = self.counts[dataset]
            counts.rows += int(rows.sum())
            counts.tokens += int(tokens.sum())
            counts.response_tokens += len(trained)
            counts.longest_row_tokens = max(counts.longest_row_tokens, int(lengths[rows].max()))

    def fingerprint(self) -> str:
        """SHA-256, in hex, over order key and content of every row in order, and where the validation tail begins."""
        digest = self._digest.copy()
        digest.update(json.dumps(self.rows).encode())
        return digest.hexdigest()


def _values(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Flat values of a list column."""
    values: npt.NDArray[Any] = column.combine_chunks().flatten().to_numpy()
    return values


@dataclass(frozen=True)
class Rules:
    """What a merge keeps: rows up to ``maximum_length`` with ids below ``vocabulary_size``, shuffled by ``seed``."""

    seed: int
    maximum_length: int
    vocabulary_size: int


class Merge:
    """One merge into ``folder``, which is empty: ``read`` each source, then ``write``."""

    def __init__(self, folder: Path, sources: Sequence[Source], rules: Rules) -> None:
        self._folder = folder
        self._sources = sources
        self._rules = rules
        self._table = RowTable()
        self._dropped = dict.fromkeys((TOO_LONG, DUPLICATE, HELD_OUT, COPY_OF_HELD_OUT), 0)
        self._spill = folder / "spill"
        tokens = sum(count_tokens(source.samples) for source in sources)
        self._partitions = Partitions(self._spill, 1 + tokens // TOKENS_PER_PARTITION)

    def run(self) -> Merged:
        """Merge.

        Raises:
            Failed: a row is wrong (``aerie.corpus.rows``), a sample id is used twice, a conversation is in two
                splits, or no row is left to train on.
        """
        for number, source in enumerate(self._sources):
            self._read(number, source)
        self._table.check_sample_ids(self._sources)
        merged = self._write()
        self._spill.rmdir()
        if merged.train_rows == 0:
            raise Failed(f"no row is left to train on: dropped {merged.dropped}")
        return merged

    def _read(self, number: int, source: Source) -> None:
        split_of: dict[str, int] = {}
        first_row = 0
        prompts = PromptHashes.read(source.prompt_hashes, self._rules.seed)
        self._table.held_out.append(prompts.hashes[prompts.held_out])
        for batch in iterate_sample_batches(source.samples):
            origin = Origin(source.samples, source.dataset, first_row)
            self._take_in(batch, origin, number, prompts)
            self._check_conversations(batch, split_of, origin)
            first_row += batch.num_rows

    def _take_in(self, batch: pa.RecordBatch, origin: Origin, number: int, prompts: PromptHashes) -> None:
        rows = check_rows(batch, origin, vocabulary_size=self._rules.vocabulary_size)
        origin.refuse(
            batch, np.array(batch.column("dataset").to_pylist()) != origin.dataset, "the row names another data set"
        )
        splits = split_codes(batch, origin)
        too_long, held_out = rows.lengths > self._rules.maximum_length, splits == BENCHMARK
        self._dropped[HELD_OUT] += int(held_out.sum())
        self._dropped[TOO_LONG] += int((too_long & ~held_out).sum())
        keys = order_keys(batch.column("sample_id").to_pylist(), self._rules.seed)
        contents = rows.content_hashes()
        asked = prompts.of(keys, otherwise=contents)
        self._table.add(keys[~too_long], asked[~too_long], splits[~too_long], number)
        kept = np.flatnonzero(~(too_long | held_out))
        derived = {
            "seq_len": rows.lengths.astype(np.int32),
            **dict(zip(SPILL_KEYS, (keys, contents[:, 0], contents[:, 1]), strict=True)),
        }
        arrays = [
            pa.array(derived[column.name]) if column.name in derived else batch.column(column.name).cast(column.type)
            for column in SPILL_SCHEMA
        ]
        spilled = pa.RecordBatch.from_arrays(arrays, schema=SPILL_SCHEMA)
        self._partitions.add(spilled, kept, splits[kept], keys[kept])

    @staticmethod
    def _check_conversations(batch: pa.RecordBatch, split_of: dict[str, int], origin: Origin) -> None:
        conversations = batch.column("conversation_id").to_pylist()
        splits = split_codes(batch, origin).tolist()
        straddles = [split_of.setdefault(c, s) != s for c, s in zip(conversations, splits, strict=True)]
        origin.refuse(batch, np.array(straddles, bool), "its conversation is also in another split")

    def _write(self) -> Merged:
        duplicates, copies = self._table.duplicates()
        self._dropped[COPY_OF_HELD_OUT] += int(copies.sum())
        self._dropped[DUPLICATE] += int((~copies).sum())
        tally = Tally([source.dataset for source in self._sources], self._rules.vocabulary_size)
        writer = CorpusWriter(self._folder)
        shards = []
        for table in self._partitions.sorted_tables(duplicates):
            if table.num_rows:
                tally.add(table)
                shards.append((writer.write_shard(table.drop_columns(list(SPILL_KEYS))), table.num_rows))
        fingerprint = tally.fingerprint()
        writer.close(fingerprint=fingerprint)
        return Merged(
            fingerprint=fingerprint,
            shards=shards,
            train_rows=tally.rows["train"],
            validation_rows=tally.rows["validation"],
            datasets=tally.counts,
            dropped=self._dropped,
            frequencies=tally.frequencies,
        )
