"""How much of a data set goes into the corpus: caps, and shares by weight. Amounts are response tokens, or rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aerie.settings.pipeline import PipelineSettings


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


def caps_of(settings: PipelineSettings) -> dict[str, Limit]:
    """Caps by data set: ``corpus.caps``, and the budget of a data set that arrives tokenised.

    Budgets of the others were kept when they were generated.
    """
    caps = {}
    for name, dataset in settings.datasets.items():
        cap = settings.corpus.caps.get(name)
        budget = dataset.budget_tokens if dataset.kind == "tokenised" and dataset.budget_tokens else None
        tokens = [most for most in (budget, cap.response_tokens if cap else None) if most is not None]
        limit = Limit(response_tokens=min(tokens, default=None), rows=cap.rows if cap else None)
        if limit != Limit():
            caps[name] = limit
    return caps


def shares_of(available: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Response tokens of each data set so that they are to each other as ``weights``, none repeated.

    The data set that is scarcest for its weight is taken whole.
    """
    if not weights:
        return {}
    unit = min(available[dataset] / weight for dataset, weight in weights.items())
    return {dataset: round(unit * weight) for dataset, weight in weights.items()}
