"""Where reasoning ends: in the rows that were trained on, and in what the verifier says to held-out prompts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from aerie.artefacts.corpus import iterate_rows
from aerie.benchmark.measures import Runs

ROWS_LOOKED_AT = 2000
"""Training rows of the data sets that are measured: rows are shuffled, so that the first are a fair sample."""


@dataclass(frozen=True)
class Closing:
    """How often, and after how many tokens (median of those that have it), a response closes its reasoning."""

    rows: int
    share: float
    median_tokens: float


@dataclass(frozen=True)
class Boundaries:
    """The closing token in training rows and in the verifier's own outputs."""

    token: str
    data: Closing
    outputs: Closing


def compare_boundaries(corpus: Path, own: Runs, *, token: str, token_id: int) -> Boundaries | None:
    """Compare training rows with the verifier's own outputs that ended by themselves; None where there are none.

    Args:
        corpus: folder of the corpus' data set.
        own: outputs without a drafter, to prompts like those of the corpus.
        token: the token that closes the reasoning, and ``token_id`` its id.

    Raises:
        BadInput: there is no corpus.
    """
    rows = islice((row for row in iterate_rows(corpus) if row.split == "train" and row.dataset in own), ROWS_LOOKED_AT)
    data = _closing((row.input_ids[row.loss_mask == 1] for row in rows), token_id)
    outputs = _closing(_ended(own), token_id)
    return None if data is None or outputs is None else Boundaries(token, data, outputs)


def _ended(own: Runs) -> Iterator[npt.NDArray[np.int64]]:
    for run in own.values():
        for request in run.requests:
            if request.finish_reason == "stop":
                yield np.asarray(request.output_ids, np.int64)


def _closing(responses: Iterable[npt.NDArray[np.integer]], token_id: int) -> Closing | None:
    """None where there are no responses."""
    rows, before = 0, []
    for ids in responses:
        rows += 1
        found = np.flatnonzero(ids == token_id)
        if len(found):
            before.append(int(found[0]))
    return Closing(rows, len(before) / rows, float(median(before)) if before else 0.0) if rows else None
