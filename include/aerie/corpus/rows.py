"""Checks on a batch of samples before they are merged: a row that is wrong is refused with its file and number."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aerie.errors import Failed

SPLITS = ("benchmark", "validation", "train")
"""In order of precedence: what is held out is never trained on."""
BENCHMARK, VALIDATION, TRAIN = range(len(SPLITS))

CONTENT_HASH_BYTES = 16
PROMPT_HASH_BYTES = 8
"""Enough where a false match leaves out a row: one of them in 100,000 merges of 10 million prompts and as many rows."""


def order_keys(sample_ids: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """Position of each row in the global shuffle, as a hash of seed and sample id: uint64 [n]."""
    digests = b"".join(hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()[:8] for sample_id in sample_ids)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


@dataclass(frozen=True)
class TokenRows:
    """Ids int32 and masks int8 of n rows, flat; row i is ``offsets[i]:offsets[i + 1]``."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int8]
    offsets: npt.NDArray[np.int64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    @cached_property
    def response_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each row where the mask is 1."""
        trained = self.mask.view(np.bool_)
        return np.array([np.count_nonzero(trained[begin:end]) for begin, end in pairwise(self.offsets.tolist())], int)

    def sums(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
        """Sum of ``values`` (one a token) over each row, none of which is empty."""
        return np.asarray(np.add.reduceat(values, self.offsets[:-1], dtype=np.int64))

    def take(self, rows: npt.NDArray[np.int64]) -> "TokenRows":
        """These rows in this order, as copies."""
        begins, ends = self.offsets[rows], self.offsets[rows + 1]
        slices = list(map(slice, begins.tolist(), ends.tolist()))
        ids = np.concatenate([self.ids[:0], *map(self.ids.__getitem__, slices)])
        mask = np.concatenate([self.mask[:0], *map(self.mask.__getitem__, slices)])
        return TokenRows(ids=ids, mask=mask, offsets=np.concatenate([[0], np.cumsum(ends - begins)]))

    def content_hashes(self) -> npt.NDArray[np.uint64]:
        """Hash of each row's ids and mask, uint64 [n, 2]: equal hashes are the same training row."""
        ids, mask, ends = self.ids.data, self.mask.data, self.offsets.tolist()
        digests = bytearray()
        for begin, end in pairwise(ends):
            digest = hashlib.sha256(ids[begin:end])
            digest.update(mask[begin:end])
            digests += digest.digest()[:CONTENT_HASH_BYTES]
        return np.frombuffer(bytes(digests), dtype="<u8").reshape(-1, 2)

    def prompt_hashes(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Hash of the ids before each run of trained tokens, which is its prompt, and the run's row: [m] both."""
        begins = self.mask.view(np.bool_).copy()
        begins[1:] &= self.mask[:-1] == 0
        begins[self.offsets[:-1]] = self.mask[self.offsets[:-1]]  # the row before may end with a trained token
        runs = np.flatnonzero(begins)
        rows = np.searchsorted(self.offsets, runs, side="right") - 1
        digest, hashed, of_row = hashlib.sha256(), 0, -1
        digests = bytearray()
        for run, row, first in zip(runs.tolist(), rows.tolist(), self.offsets[rows].tolist(), strict=True):
            if row != of_row:
                digest, hashed, of_row = hashlib.sha256(), first, row
            digest.update(self.ids[hashed:run].data)
            hashed = run
            digests += digest.digest()[:PROMPT_HASH_BYTES]
        return np.frombuffer(bytes(digests), dtype="<u8"), rows


@dataclass(frozen=True)
class Origin:
    """Where a batch of samples comes from: its file, data set, and the number of its first row."""

    path: Path
    dataset: str
    first_row: int

    def refuse(self, batch: pa.RecordBatch, wrong: npt.NDArray[np.bool_], problem: str) -> None:
        """Raise Failed for the first row where ``wrong``.

        Raises:
            Failed: some row is wrong; the message names file, row number and sample id.
        """
        rows = np.flatnonzero(wrong)
        if len(rows):
            row = int(rows[0])
            sample_id = batch.column("sample_id")[row].as_py()
            raise Failed(
                f"{self.path}, row {self.first_row + row} (sample {sample_id}): {problem}; validate data set "
                f"{self.dataset} again, it must not let such a row through"
            )


def check_rows(batch: pa.RecordBatch, origin: Origin, *, vocabulary_size: int) -> TokenRows:
    """Check a batch of samples and return its tokens.

    Raises:
        Failed: ids and mask differ in length, a row is empty, an id is outside the verifier's vocabulary, a mask holds
            something other than 0 and 1, or trains no token.
    """
    ids, id_offsets = flat(batch.column("input_ids"))
    mask, mask_offsets = flat(batch.column("loss_mask"))
    lengths, mask_lengths = np.diff(id_offsets), np.diff(mask_offsets)
    origin.refuse(batch, lengths != mask_lengths, "input_ids and loss_mask differ in length")
    origin.refuse(batch, lengths == 0, "the row has no tokens")
    rows = TokenRows(ids=ids.astype(np.int32, copy=False), mask=mask.astype(np.int8, copy=False), offsets=id_offsets)
    for values, end, problem in (
        (rows.ids.view(np.uint32), vocabulary_size, f"a token id is outside the vocabulary of {vocabulary_size}"),
        (rows.mask.view(np.uint8), 2, "loss_mask holds something other than 0 and 1"),
    ):
        if len(values) and values.max() >= end:  # as unsigned numbers, negative ones are large
            origin.refuse(batch, rows.sums(values >= end) > 0, problem)
    origin.refuse(batch, rows.response_tokens == 0, "loss_mask is all zeros, nothing would be trained")
    return rows


def split_codes(batch: pa.RecordBatch, origin: Origin) -> npt.NDArray[np.int8]:
    """Split of each row as its index in ``SPLITS``.

    Raises:
        Failed: a split has another name.
    """
    found = pc.index_in(batch.column("split"), pa.array(SPLITS)).fill_null(-1)
    codes: npt.NDArray[np.int8] = found.to_numpy(zero_copy_only=False).astype(np.int8)
    origin.refuse(batch, codes < 0, f"unknown split: expected one of {', '.join(SPLITS)}")
    return codes


def flat(column: pa.ListArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Values and offsets of a list column, the offsets starting at 0."""
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    return values.to_numpy(), offsets - offsets[0]
