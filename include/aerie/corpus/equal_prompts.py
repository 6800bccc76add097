"""Equal prompts across data sets: by the hashes that ``prepare`` made of their normalised content, or by token ids.

Of rows that arrive tokenised nobody knows what was asked, only its ids.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aerie.artefacts.prompt_hashes import iterate_prompt_hash_batches
from aerie.artefacts.prompts import iterate_prompt_ids
from aerie.corpus.rows import PROMPT_HASH_BYTES, TokenRows, flat, order_keys

Uint64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class PromptHashes:
    """The prompts of one data set: order keys uint64 [n], sorted, hashes uint64 [n, 2], which are held out bool [n]."""

    keys: Uint64Array
    hashes: Uint64Array
    held_out: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, path: Path, seed: int) -> Self:
        """Read the file that ``prepare`` wrote; none, where there is no such file."""
        batches = list(_arrays(path, seed)) if path.is_file() else []
        empty = (np.empty(0, np.uint64), np.empty((0, 2), np.uint64), np.empty(0, bool))
        keys, hashes, held_out = (np.concatenate(arrays) for arrays in zip(empty, *batches, strict=True))
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], hashes[order], held_out[order])

    def of(self, keys: Uint64Array, otherwise: Uint64Array) -> Uint64Array:
        """Hashes of the prompts of rows with these order keys; ``otherwise`` [n, 2] of rows without a known prompt."""
        if not len(self.keys):
            return otherwise
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        known = self.keys[places] == keys
        return np.where(known[:, None], self.hashes[places], otherwise)


@dataclass(frozen=True)
class PreparedPrompts:
    """What ``prepare`` wrote of all generated data sets, in any split, by token ids: hashes uint64 [n], sorted."""

    hashes: Uint64Array

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Self:
        """Read the prompts of these files; one without ids, which was skipped, is none.

        Raises:
            BadInput: a file is missing or is not one of prompts.
        """
        digests = b"".join(map(_digests, chain.from_iterable(map(iterate_prompt_ids, paths))))
        return cls(np.unique(np.frombuffer(digests, dtype="<u8")))

    def asked_by(self, rows: TokenRows) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` train on an answer to one of these prompts, at any of their turns: bool [n]."""
        hashes, of_rows = rows.prompt_hashes()
        asked = np.zeros(len(rows.lengths), bool)
        if len(self.hashes):
            places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
            asked[of_rows[self.hashes[places] == hashes]] = True
        return asked


def _digests(prompts: pa.ListArray) -> bytes:
    values, offsets = flat(prompts)
    ids = values.astype(np.int32, copy=False)
    pairs = pairwise(offsets.tolist())
    return b"".join(hashlib.sha256(ids[a:b].data).digest()[:PROMPT_HASH_BYTES] for a, b in pairs if a < b)


def _arrays(path: Path, seed: int) -> Iterator[tuple[Uint64Array, Uint64Array, npt.NDArray[np.bool_]]]:
    for batch in iterate_prompt_hash_batches(path):
        keys = order_keys(batch.column("sample_id").to_pylist(), seed)
        yield keys, _hashes(batch.column("prompt_hash")), np.array(batch.column("split").to_pylist()) == "benchmark"


def _hashes(column: pa.Array) -> Uint64Array:
    return np.frombuffer(b"".join(column.to_pylist()), dtype="<u8").reshape(-1, 2)
