"""Which rows stay: a few numbers a row for all rows of a merge, and why each of the others is dropped.

It depends on seed, sample ids, contents and the names of data sets only, of which the first in the pipeline's order
(``keys_in_order``) keeps what several have: not on the order of settings or rows, nor on how rows were partitioned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from aerie.corpus.limits import Limit
from aerie.corpus.rows import BENCHMARK

Uint64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]

REASONS = (
    "kept",
    "held_out",
    "too_long",
    "prompt_of_generated",
    "duplicate",
    "copy_of_held_out",
    "over_cap",
    "over_weight",
)
"""What becomes of a row. ``held_out``: for the benchmark. ``prompt_of_generated``: it arrived tokenised, and some
generated data set asks its prompt, in whatever split. The last two: ``corpus.caps`` and ``corpus.weights``."""
KEPT, HELD_OUT, TOO_LONG, PROMPT_OF_GENERATED, DUPLICATE, COPY_OF_HELD_OUT, OVER_CAP, OVER_WEIGHT = range(len(REASONS))


@dataclass(frozen=True)
class RowNumbers:
    """Numbers of n rows.

    ``keys`` uint64 [n] are order keys, ``prompts`` and ``contents`` uint64 [n, 2] hashes, equal ones of which make two
    rows the same, ``prompts_of_generated`` bool [n] tells of rows that arrived tokenised whether a generated data set
    asks their prompt, ``splits`` int8 [n] and ``datasets`` int16 [n] are indices, the rest int32 [n] counts of tokens.
    """

    keys: Uint64Array
    prompts: Uint64Array
    contents: Uint64Array
    prompts_of_generated: npt.NDArray[np.bool_]
    splits: npt.NDArray[np.int8]
    datasets: npt.NDArray[np.int16]
    tokens: Int32Array
    response_tokens: Int32Array
    reasoning_tokens: Int32Array

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All rows of ``parts``, of which there is at least one."""
        names = cls.__dataclass_fields__
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def none(cls) -> Self:
        """No rows."""
        numbers = np.empty(0, np.int32)
        return cls(
            keys=np.empty(0, np.uint64),
            prompts=np.empty((0, 2), np.uint64),
            contents=np.empty((0, 2), np.uint64),
            prompts_of_generated=np.empty(0, bool),
            splits=np.empty(0, np.int8),
            datasets=np.empty(0, np.int16),
            tokens=numbers,
            response_tokens=numbers,
            reasoning_tokens=numbers,
        )


@dataclass
class Selection:
    """The rows of a merge and what becomes of each: ``reasons`` int8 [n], indices of ``REASONS``.

    ``same_as`` uint64 [n] is the order key of the row that stays in place of a copy, 0 where there is none.
    """

    rows: RowNumbers
    reasons: npt.NDArray[np.int8]
    same_as: Uint64Array = field(init=False)

    def __post_init__(self) -> None:
        self.same_as = np.zeros(len(self.reasons), np.uint64)

    @classmethod
    def of(cls, rows: RowNumbers, *, maximum_length: int) -> Self:
        """The rows, without those of the benchmark, too long ones, and tokenised ones with a generated prompt."""
        reasons = np.zeros(len(rows.keys), np.int8)
        reasons[rows.prompts_of_generated] = PROMPT_OF_GENERATED
        reasons[rows.tokens > maximum_length] = TOO_LONG
        reasons[rows.splits == BENCHMARK] = HELD_OUT
        return cls(rows, reasons)

    def drop_copies(self, held_out: Uint64Array) -> None:
        """Drop all but one of the rows that answer one prompt, then of those with one content.

        The one in the most precious split stays, then that of the first data set. Prompts that are ``held_out``
        (uint64 [m, 2]), for which there are no rows, come before all.
        """
        self._drop_equal(self.rows.prompts, held_out)
        self._drop_equal(self.rows.contents, held_out[:0])
        self._follow_dropped()

    def _follow_dropped(self) -> None:
        """What was dropped for a row that was dropped later is the same as the one that this was dropped for."""
        dropped = np.flatnonzero(self.same_as)
        if not len(dropped):
            return
        dropped = dropped[np.argsort(self.rows.keys[dropped])]
        keys, same = self.rows.keys[dropped], self.same_as[dropped]
        places = np.minimum(np.searchsorted(keys, same), len(keys) - 1)
        self.same_as[dropped] = np.where(keys[places] == same, same[places], same)

    def _drop_equal(self, hashes: Uint64Array, held_out: Uint64Array) -> None:
        taking_part = np.flatnonzero((self.reasons == KEPT) | (self.reasons == HELD_OUT))
        none, rows = len(held_out), self.rows
        contents = np.concatenate([held_out, hashes[taking_part]])
        again = _occurring_again(contents[:, 0])
        contents = contents[again]
        keys = np.concatenate([np.zeros(none, np.uint64), rows.keys[taking_part]])[again]
        splits = np.concatenate([np.full(none, BENCHMARK, np.int8), rows.splits[taking_part]])[again]
        datasets = np.concatenate([np.full(none, -1, np.int16), rows.datasets[taking_part]])[again]
        order = np.lexsort((keys, datasets, splits, contents[:, 1], contents[:, 0]))
        repeats = np.zeros(len(order), bool)
        repeats[1:] = (contents[order][1:] == contents[order][:-1]).all(axis=1)
        firsts = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))
        dropped = np.flatnonzero(repeats & (splits[order] != BENCHMARK))
        of_held_out = splits[order][firsts[dropped]] < splits[order][dropped]
        places = taking_part[again[order[dropped]] - none]
        self.reasons[places] = np.where(of_held_out, COPY_OF_HELD_OUT, DUPLICATE)
        self.same_as[places] = keys[order][firsts[dropped]]

    def thin_out(self, dataset: int, limit: Limit, reason: int) -> None:
        """Drop rows of the data set with this number, drawn by their order keys, while it exceeds ``limit``."""
        places = self._kept(dataset)
        order = places[np.argsort(sampling_keys(self.rows.keys[places]), kind="stable")]
        kept = limit.rows_within(self.rows.response_tokens[order])
        self.reasons[order[kept:]] = reason

    def response_tokens(self, dataset: int) -> int:
        """Response tokens that are left of the data set with this number."""
        return int(self.rows.response_tokens[self._kept(dataset)].sum(dtype=np.int64))

    def _kept(self, dataset: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero((self.rows.datasets == dataset) & (self.reasons == KEPT))


def _occurring_again(words: Uint64Array) -> npt.NDArray[np.int64]:
    """Places of all values that occur more than once: few, and only they need to be compared by all they have."""
    order = np.argsort(words)
    same = words[order][1:] == words[order][:-1]
    return order[np.append(same, False) | np.append(False, same)] if len(order) else order


def repeated_keys(keys: Uint64Array) -> npt.NDArray[np.int64]:
    """Pairs of rows with the same order key: int64 [m, 2]."""
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    return np.stack([order[same], order[same + 1]], axis=1)


def sampling_keys(keys: Uint64Array) -> Uint64Array:
    """Another order of the same rows, as random as the first: a sample by it is spread over the whole shuffle.

    The finaliser of SplitMix64, a bijection.
    """
    mixed = keys + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
