"""Merging validated data sets into one shuffled training set, in bounded memory.

Every row gets an order key, the hash of seed and sample id: the permutation depends on nothing else, not on the order
of rows, the number of shards or an interruption. Rows are spilled into partitions by key, then each partition is
sorted and becomes one shard, so that memory holds some rows and a few numbers of every row. One thread decodes batches,
one checks, hashes and counts them, one sets them down; nearly all of it is C code that lets the others run.

Equal prompts of different data sets are found here, not before generation: data sets are prepared and generated at
different times, also in different runs, and only when all are there does it depend on nothing else which one stays.
Two rows are the same if they answer the same prompt, which only rows of different data sets can, since ``prepare``
takes a prompt once, or if their ids and masks are. Of rows that arrive tokenised nobody knows what was asked, so that
they are compared by ids: one that answers a prompt of a generated data set is left out, whatever the prompt's split,
lest what is held out there be trained on through it.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aerie.artefacts.corpus import CORPUS_SCHEMA, ROWS_PER_RECORD_BATCH, CorpusWriter, Int64Array
from aerie.artefacts.files import sha256_of, sync_file
from aerie.artefacts.samples import SAMPLE_SCHEMA, count_rows, count_tokens, iterate_sample_batches
from aerie.corpus.equal_prompts import PreparedPrompts, PromptHashes
from aerie.corpus.limits import Limit, shares_of
from aerie.corpus.progress import Progress
from aerie.corpus.read_ahead import read_ahead
from aerie.corpus.rows import BENCHMARK, SPLITS, VALIDATION, Origin, TokenRows, check_rows, order_keys, split_codes
from aerie.corpus.selection import KEPT, OVER_CAP, OVER_WEIGHT, REASONS, RowNumbers, Selection, repeated_keys
from aerie.corpus.spill import Spill, SpilledRows
from aerie.corpus.tally import DatasetStatistics, Tally, statistics_of
from aerie.errors import Failed

TOKENS_PER_PARTITION = 20_000_000
MOST_PARTITIONS = 64
"""Of each split; three files a partition stay open, and a process may have 1,024."""

TOKEN_COLUMNS = ("input_ids", "loss_mask")
IDENTITY = ("order_key", "content_0", "content_1")
COLUMNS = [field.name for field in SAMPLE_SCHEMA if field.name not in ("prompt_tokens", "response_tokens", "flags")]
ABOUT_SCHEMA = pa.schema(
    [field for field in CORPUS_SCHEMA if field.name not in TOKEN_COLUMNS]
    + [pa.field(name, pa.uint64()) for name in IDENTITY]
    + [pa.field("dataset_number", pa.int16())]
)


@dataclass(frozen=True)
class Source:
    """Samples of one validated data set, and the hashes of its prompts, if it did not arrive ``tokenised``."""

    dataset: str
    samples: Path
    prompt_hashes: Path
    tokenised: bool


@dataclass(frozen=True)
class Prepared:
    """Files of ``prepare`` by which rows are kept out that no source holds.

    ``prompts``: rows that arrive tokenised may answer none of them. ``prompt_hashes``, of data sets that are prepared
    and not merged: no row may answer what they hold out for the benchmark, which asks it of all that is prepared.
    """

    prompts: Sequence[Path] = ()
    prompt_hashes: Sequence[Path] = ()

    @property
    def files(self) -> list[Path]:
        """All of them."""
        return [*self.prompts, *self.prompt_hashes]


@dataclass(frozen=True)
class Rules:
    """What a merge keeps: rows up to ``maximum_length`` with ids below ``vocabulary_size``, shuffled by ``seed``.

    ``caps`` and ``weights`` thin out data sets, by name (``aerie.corpus.limits``).
    """

    seed: int
    maximum_length: int
    vocabulary_size: int
    caps: Mapping[str, Limit] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """A file of the corpus, on the disk for good."""

    name: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class Merged:
    """What a merge wrote; ``frequencies`` are counts of response tokens by id, int64 [V], by data set."""

    fingerprint: str
    shards: Sequence[Shard]
    train_rows: int
    validation_rows: int
    selection: Selection
    datasets: Mapping[str, DatasetStatistics]
    frequencies: Mapping[str, Int64Array]

    @property
    def dropped(self) -> dict[str, int]:
        """Rows that were dropped, by reason."""
        outcomes = np.bincount(self.selection.reasons, minlength=len(REASONS)).tolist()
        return {reason: n for reason, n in zip(REASONS, outcomes, strict=True) if reason != REASONS[KEPT]}

    @property
    def counts(self) -> dict[str, Any]:
        """Counts for the manifest."""
        by_dataset = {name: one.counts(self.frequencies[name]) for name, one in self.datasets.items()}
        kept = by_dataset.values()
        total = np.sum(list(self.frequencies.values()), axis=0)
        return {
            "corpus_fingerprint": self.fingerprint,
            "rows": self.train_rows + self.validation_rows,
            "train_rows": self.train_rows,
            "validation_rows": self.validation_rows,
            "tokens": sum(counts["tokens"] for counts in kept),
            "response_tokens": sum(counts["response_tokens"] for counts in kept),
            "longest_row_tokens": max(counts["longest_row_tokens"] for counts in kept),
            "distinct_tokens": int(np.count_nonzero(total)),
            "datasets": by_dataset,
            "dropped": self.dropped,
        }


@dataclass(frozen=True)
class _Batch:
    """Rows as they lie in a data set; ``split_of`` has the splits of its conversations so far."""

    rows: pa.RecordBatch
    dataset_number: int
    tokenised: bool
    origin: Origin
    prompts: PromptHashes
    split_of: dict[str, int]


@dataclass(frozen=True)
class _CheckedBatch:
    """The numbers of all its rows; of those that can stay, in the order of their partitions, everything."""

    batch: _Batch
    rows: RowNumbers
    about: pa.RecordBatch
    tokens: TokenRows
    partitions: Int64Array


class Merge:
    """One merge into ``folder``, which is not there yet: every source is read, then the shards are written.

    Of equal rows in one split that of the first of ``sources`` stays.
    """

    def __init__(
        self, folder: Path, sources: Sequence[Source], rules: Rules, prepared: Prepared, progress: Progress
    ) -> None:
        self._folder = folder
        self._sources = sources
        self._rules = rules
        self._rows = [RowNumbers.none()]
        self._prepared = PreparedPrompts.read(prepared.prompts)
        self._held_out: list[npt.NDArray[np.uint64]] = [np.empty((0, 2), np.uint64)]
        for path in prepared.prompt_hashes:
            self._hold_out(PromptHashes.read(path, rules.seed))
        self._progress = progress
        tokens = sum(count_tokens(source.samples) for source in sources)
        self._partitions = min(1 + tokens // TOKENS_PER_PARTITION, MOST_PARTITIONS)
        self._tally = Tally(len(sources), rules.vocabulary_size)
        self._spill = Spill(folder / "spill", ABOUT_SCHEMA)

    def run(self) -> Merged:
        """Merge.

        Raises:
            Failed: a row is wrong (``aerie.corpus.rows``), a sample id is used twice, a conversation is in two
                splits, a data set with a weight has no row, or no row is left to train on.
        """
        taken, of_rows = 0, sum(count_rows(source.samples) for source in self._sources)
        for checked in read_ahead(map(self._check, read_ahead(self._read()))):
            self._take_in(checked)
            taken += len(checked.rows.keys)
            self._progress.told("checked", taken, of_rows)
        selection = self._select()
        merged = self._write(selection)
        if merged.train_rows == 0:
            raise Failed(f"no row is left to train on: dropped {merged.dropped}")
        return merged

    def _read(self) -> Iterator[_Batch]:
        for number, source in enumerate(self._sources):
            prompts = PromptHashes.read(source.prompt_hashes, self._rules.seed)
            self._hold_out(prompts)
            split_of: dict[str, int] = {}
            first_row = 0
            for rows in iterate_sample_batches(source.samples, COLUMNS):
                origin = Origin(source.samples, source.dataset, first_row)
                yield _Batch(rows, number, source.tokenised, origin, prompts, split_of)
                first_row += rows.num_rows

    def _hold_out(self, prompts: PromptHashes) -> None:
        self._held_out.append(prompts.hashes[prompts.held_out])

    def _check(self, batch: _Batch) -> _CheckedBatch:
        """Check the rows, hash them and count their tokens."""
        samples, origin = batch.rows, batch.origin
        tokens = check_rows(samples, origin, vocabulary_size=self._rules.vocabulary_size)
        origin.refuse(
            samples, np.array(samples.column("dataset").to_pylist()) != origin.dataset, "the row names another data set"
        )
        splits = split_codes(samples, origin)
        keys = order_keys(samples.column("sample_id").to_pylist(), self._rules.seed)
        contents = tokens.content_hashes()
        rows = RowNumbers(
            keys=keys,
            prompts=batch.prompts.of(keys, otherwise=contents),
            contents=contents,
            prompts_of_generated=self._prepared.asked_by(tokens) if batch.tokenised else np.zeros(len(keys), bool),
            splits=splits,
            datasets=np.full(len(keys), batch.dataset_number, np.int16),
            tokens=tokens.lengths.astype(np.int32),
            response_tokens=tokens.response_tokens.astype(np.int32),
            reasoning_tokens=samples.column("reasoning_tokens").to_numpy(),
        )
        derived = {
            "seq_len": rows.tokens,
            "dataset_number": rows.datasets,
            **dict(zip(IDENTITY, (keys, contents[:, 0], contents[:, 1]), strict=True)),
        }
        about = pa.RecordBatch.from_arrays(
            [
                pa.array(derived[column.name]) if column.name in derived else samples.column(column.name)
                for column in ABOUT_SCHEMA
            ],
            schema=ABOUT_SCHEMA,
        )
        left_out = (rows.tokens > self._rules.maximum_length) | (splits == BENCHMARK) | rows.prompts_of_generated
        kept = np.flatnonzero(~left_out)
        partitions = self._partitions_of(keys[kept], splits[kept])
        order = np.argsort(partitions, kind="stable")
        chosen = tokens.take(kept[order])
        self._tally.count(batch.dataset_number, chosen)
        return _CheckedBatch(batch, rows, about.take(pa.array(kept[order])), chosen, partitions[order])

    def _take_in(self, checked: _CheckedBatch) -> None:
        self._rows.append(checked.rows)
        self._spill.add(checked.about, checked.tokens, checked.partitions)
        _check_conversations(checked.batch, checked.rows.splits)

    def _partitions_of(self, keys: npt.NDArray[np.uint64], splits: npt.NDArray[np.int8]) -> Int64Array:
        """Partitions in the order of keys, those of the training split before those of validation."""
        slices = np.minimum((keys / 2.0**64 * self._partitions).astype(np.int64), self._partitions - 1)
        return slices + np.where(splits == VALIDATION, self._partitions, 0)

    def _select(self) -> Selection:
        rows, rules = RowNumbers.joined(self._rows), self._rules
        repeated = repeated_keys(rows.keys)
        if len(repeated):
            first, second = (self._sources[number].samples for number in rows.datasets[repeated[0]])
            raise Failed(
                f"{len(repeated)} sample ids occur twice, first in {first} and {second}: a sample id must "
                "name one prompt of one data set; validate both again"
            )
        selection = Selection.of(rows, maximum_length=rules.maximum_length)
        selection.drop_copies(np.concatenate(self._held_out))
        numbers = {source.dataset: number for number, source in enumerate(self._sources)}
        for name, cap in rules.caps.items():
            if name in numbers:
                selection.thin_out(numbers[name], cap, OVER_CAP)
        weights = {name: weight for name, weight in rules.weights.items() if name in numbers}
        left = {name: selection.response_tokens(numbers[name]) for name in weights}
        if none := [name for name, tokens in left.items() if not tokens]:
            raise Failed(
                f"corpus.weights: no row is left of {', '.join(none)}, so that nothing of the others could stay in "
                "proportion; take it out of corpus.weights, or generate it"
            )
        for name, tokens in shares_of(left, weights).items():
            selection.thin_out(numbers[name], Limit(response_tokens=tokens), OVER_WEIGHT)
        return selection

    def _write(self, selection: Selection) -> Merged:
        kept = np.sort(selection.rows.keys[selection.reasons == KEPT])
        writer = CorpusWriter(self._folder)
        finished: list[Future[Shard]] = []
        written = 0
        with ThreadPoolExecutor(max_workers=2) as finishing:  # one shard is hashed while the disk syncs another
            for partition in self._spill.partitions():
                rows, others = _final_order(partition, kept)
                self._count_off(partition, others)
                if len(rows):
                    batches = read_ahead(self._batches(partition, rows))
                    path = writer.write_batches(self._told(batches, written, len(kept)))
                    written += len(rows)
                    finished.append(finishing.submit(_finish, path, len(rows)))
        fingerprint = self._tally.fingerprint()
        writer.close(fingerprint=fingerprint)
        datasets = [source.dataset for source in self._sources]
        return Merged(
            fingerprint=fingerprint,
            shards=[shard.result() for shard in finished],
            train_rows=self._tally.train_rows,
            validation_rows=self._tally.validation_rows,
            selection=selection,
            datasets=statistics_of(selection, datasets),
            frequencies=self._tally.frequencies(datasets),
        )

    def _told(self, batches: Iterator[pa.RecordBatch], written: int, of_rows: int) -> Iterator[pa.RecordBatch]:
        """The ``batches``, told of as they are written, ``written`` rows after the first of ``of_rows``."""
        for batch in batches:
            yield batch
            written += batch.num_rows
            self._progress.told("wrote", written, of_rows)

    def _batches(self, partition: SpilledRows, rows: Int64Array) -> Iterator[pa.RecordBatch]:
        """The ``rows`` of a partition as record batches of the corpus."""
        about = partition.about.combine_chunks()
        split = SPLITS.index(about["split"][0].as_py())
        for some in _pieces(rows):
            columns = about.take(pa.array(some)).to_batches()[0]
            self._tally.add_rows(split, np.stack([columns.column(name).to_numpy() for name in IDENTITY], axis=1))
            yield _record_batch(columns, partition.tokens.take(some))

    def _count_off(self, partition: SpilledRows, rows: Int64Array) -> None:
        numbers = partition.about["dataset_number"].to_numpy()[rows]
        for number in np.unique(numbers).tolist():
            for some in _pieces(rows[numbers == number]):
                self._tally.count_off(number, partition.tokens.take(some))


def _check_conversations(batch: _Batch, splits: npt.NDArray[np.int8]) -> None:
    conversations = batch.rows.column("conversation_id").to_pylist()
    straddles = [batch.split_of.setdefault(c, s) != s for c, s in zip(conversations, splits.tolist(), strict=True)]
    batch.origin.refuse(batch.rows, np.array(straddles, bool), "its conversation is also in another split")


def _final_order(partition: SpilledRows, kept: npt.NDArray[np.uint64]) -> tuple[Int64Array, Int64Array]:
    """Rows of a partition whose order key is among ``kept`` (sorted), by that key, and the others."""
    keys = partition.about[IDENTITY[0]].to_numpy()
    order = np.argsort(keys, kind="stable")
    stays = np.searchsorted(kept, keys[order], side="left") < np.searchsorted(kept, keys[order], side="right")
    return order[stays], order[~stays]


def _pieces(rows: Int64Array) -> Iterator[Int64Array]:
    """``rows``, as many at a time as a record batch has."""
    for first in range(0, len(rows), ROWS_PER_RECORD_BATCH):
        yield rows[first : first + ROWS_PER_RECORD_BATCH]


def _record_batch(about: pa.RecordBatch, tokens: TokenRows) -> pa.RecordBatch:
    offsets = pa.array(tokens.offsets.astype(np.int32))
    lists = {
        name: pa.ListArray.from_arrays(offsets, pa.array(values))
        for name, values in zip(TOKEN_COLUMNS, (tokens.ids, tokens.mask), strict=True)
    }
    columns = [lists[column.name] if column.name in lists else about.column(column.name) for column in CORPUS_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=CORPUS_SCHEMA)


def _finish(path: Path, rows: int) -> Shard:
    """Make a shard durable, and hash it, while the next one is written."""
    sync_file(path)
    return Shard(path.name, rows, sha256_of(path))
