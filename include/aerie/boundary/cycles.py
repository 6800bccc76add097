"""Degenerate repetition: cycles of 1 to 128 tokens.

A cycle is a stretch in which every token equals the one a period before it; a rotated cycle is the same stretch, so
none is missed for where it starts. It counts from three exact copies and 48 tokens. Every such stretch holds at least
32 matches in a row, hence four consecutive multiples of 8: testing only every eighth position against all periods
finds each candidate at an eighth of the work, and exact comparison runs for candidates alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAXIMUM_PERIOD = 128
MINIMUM_COPIES = 3
MINIMUM_TOKENS = 48
_STRIDE = 8


@dataclass(frozen=True)
class Cycle:
    """Tokens ``start`` to ``stop`` (exclusive) repeat with ``period``."""

    start: int
    stop: int
    period: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.start


def find_cycles(ids: NDArray[np.int64]) -> Iterator[Cycle]:
    """Cycles of ``ids`` (int64 [n], none negative), by period, the smallest first."""
    for period in _candidate_periods(ids):
        matches = np.zeros(ids.size - period + 2, dtype=np.int8)
        matches[1:-1] = ids[period:] == ids[:-period]
        edges = np.flatnonzero(matches[1:] != matches[:-1])
        firsts, lasts = edges[::2], edges[1::2]
        long_enough = lasts - firsts >= max(MINIMUM_COPIES * period, MINIMUM_TOKENS) - period
        for first, last in zip(firsts[long_enough].tolist(), lasts[long_enough].tolist(), strict=True):
            yield Cycle(first, last + period, period)


def _candidate_periods(ids: NDArray[np.int64]) -> list[int]:
    if ids.size < MINIMUM_TOKENS:
        return []
    padded = np.full(ids.size + MAXIMUM_PERIOD, -1, dtype=np.int32)
    padded[MAXIMUM_PERIOD:] = ids
    # As sliding_window_view has it, at a third of the time.
    windows = np.ndarray(
        shape=((ids.size + _STRIDE - 1) // _STRIDE, MAXIMUM_PERIOD + 1),
        dtype=np.int32,
        buffer=padded,
        strides=(_STRIDE * padded.itemsize, padded.itemsize),
    )
    matches = windows[:, :MAXIMUM_PERIOD] == windows[:, MAXIMUM_PERIOD:]
    pairs = matches[:-1] & matches[1:]
    columns = np.flatnonzero((pairs[:-2] & pairs[2:]).any(axis=0))
    return sorted((MAXIMUM_PERIOD - columns).tolist())
