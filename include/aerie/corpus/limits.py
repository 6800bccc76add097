"""How much of a data set goes into the corpus: caps, and shares by weight. Amounts are response tokens, or rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Limit:
    """The most of one data set, of both splits together; None: no limit."""

    response_tokens: int | None = None
    rows: int | None = None

    def rows_within(self, response_tokens: npt.NDArray[np.int32]) -> int:
        """How many rows are taken of rows in sampling order, with these response tokens (int32 [n]).

        It ends before the first row that would exceed it, however short the rows behind: passing over the long ones
        would bias the data to short answers.
        """
        within = len(response_tokens) if self.rows is None else min(self.rows, len(response_tokens))
        if self.response_tokens is None:
            return within
        sums = np.cumsum(response_tokens, dtype=np.int64)
        return min(within, int(np.searchsorted(sums, self.response_tokens, side="right")))


def shares_of(available: Mapping[int, int], weights: Mapping[int, float]) -> dict[int, int]:
    """Response tokens of each data set so that they are to each other as ``weights``, none repeated.

    The data set that is scarcest for its weight is taken whole; where it has none, nothing is left of the others.
    """
    if not weights:
        return {}
    unit = min(available[dataset] / weight for dataset, weight in weights.items())
    return {dataset: round(unit * weight) for dataset, weight in weights.items()}
