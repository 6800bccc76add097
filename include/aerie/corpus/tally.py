"""What a corpus holds: counts and distributions by data set, token frequencies, and the fingerprint of its rows."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aerie.corpus.rows import SPLITS, TRAIN, VALIDATION, TokenRows
from aerie.corpus.selection import KEPT, REASONS, Selection

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class DatasetStatistics:
    """What the corpus has of one data set; lengths are tokens a row, int32 [rows]."""

    lengths: Int32Array
    response_lengths: Int32Array
    reasoning_tokens: int
    dropped: Mapping[str, int]

    def counts(self, frequencies: Int64Array) -> dict[str, Any]:
        """Counts for the manifest, with those by token id (int64 [V]) of its response tokens."""
        response_tokens = int(self.response_lengths.sum(dtype=np.int64))
        return {
            "rows": len(self.lengths),
            "tokens": int(self.lengths.sum(dtype=np.int64)),
            "response_tokens": response_tokens,
            "longest_row_tokens": int(self.lengths.max(initial=0)),
            "length_percentiles": _percentiles(self.lengths),
            "response_length_percentiles": _percentiles(self.response_lengths),
            "reasoning_tokens": self.reasoning_tokens,
            "reasoning_share": self.reasoning_tokens / response_tokens if response_tokens else None,
            "distinct_tokens": int(np.count_nonzero(frequencies)),
            "dropped": dict(self.dropped),
        }


def _percentiles(lengths: Int32Array) -> dict[str, int]:
    if not len(lengths):
        return {}
    values = np.percentile(lengths, PERCENTILES, method="lower").tolist()
    return {f"p{percentile}": int(value) for percentile, value in zip(PERCENTILES, values, strict=True)}


def statistics_of(selection: Selection, datasets: Sequence[str]) -> dict[str, DatasetStatistics]:
    """What the selected rows of each data set (by number) are, and what became of its others."""
    rows = selection.rows
    statistics = {}
    for number, name in enumerate(datasets):
        of_dataset = rows.datasets == number
        kept = of_dataset & (selection.reasons == KEPT)
        outcomes = np.bincount(selection.reasons[of_dataset], minlength=len(REASONS)).tolist()
        statistics[name] = DatasetStatistics(
            lengths=rows.tokens[kept],
            response_lengths=rows.response_tokens[kept],
            reasoning_tokens=int(rows.reasoning_tokens[kept].sum(dtype=np.int64)),
            dropped={reason: n for reason, n in zip(REASONS, outcomes, strict=True) if reason != REASONS[KEPT]},
        )
    return statistics


class Tally:
    """Frequencies of response tokens, and fingerprint of the rows.

    Tokens are counted as they are read, where the rows of a batch share a data set, and those of rows that turn out
    not to stay are counted off: sorting the tokens of shuffled rows by data set would take three times as long.
    """

    def __init__(self, datasets: int, vocabulary_size: int) -> None:
        self._frequencies = np.zeros((datasets, vocabulary_size), np.int64)
        self._digest = hashlib.sha256()
        self._rows = dict.fromkeys((TRAIN, VALIDATION), 0)

    def count(self, dataset: int, tokens: TokenRows) -> None:
        """Count the response tokens of rows of the data set with this number."""
        self._frequencies[dataset] += self._occurrences(tokens)

    def count_off(self, dataset: int, tokens: TokenRows) -> None:
        """Take back the response tokens of rows that were counted."""
        self._frequencies[dataset] -= self._occurrences(tokens)

    def _occurrences(self, tokens: TokenRows) -> Int64Array:
        import torch

        # NumPy would count a copy of the ids as int64, and let no other thread run meanwhile.
        responses = torch.from_numpy(tokens.ids[tokens.mask.view(np.bool_)])
        counts: Int64Array = torch.bincount(responses, minlength=self._frequencies.shape[1]).numpy()
        return counts

    def add_rows(self, split: int, identity: npt.NDArray[np.uint64]) -> None:
        """Add the next rows of the corpus, of one split: order key and content hash of each, uint64 [n, 3]."""
        self._rows[split] += len(identity)
        self._digest.update(np.ascontiguousarray(identity).data)

    def frequencies(self, datasets: Sequence[str]) -> dict[str, Int64Array]:
        """Counts by token id, int64 [V], by data set."""
        return dict(zip(datasets, self._frequencies, strict=True))

    def fingerprint(self) -> str:
        """SHA-256, in hex, over order key and content of every row in order, and where the validation tail begins."""
        digest = self._digest.copy()
        digest.update(json.dumps({SPLITS[split]: rows for split, rows in self._rows.items()}).encode())
        return digest.hexdigest()

    @property
    def train_rows(self) -> int:
        """Rows of the training split."""
        return self._rows[TRAIN]

    @property
    def validation_rows(self) -> int:
        """Rows of the validation split."""
        return self._rows[VALIDATION]
