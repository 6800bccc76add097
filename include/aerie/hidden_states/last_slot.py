"""What the last stored states say when the verifier's own head reads them: a check that needs no verifier.

The last slot is the last layer's output before the final norm, so norm and head turn it into the verifier's prediction
of the next token, and that token is in the row. The verifier agrees with its own responses; states of another model, or
of other positions, do not. What the norm has already been applied to has, divided by the norm's weight, a root mean
square of 1 at every token, which nothing else has. A slot of a neighbouring layer passes: that takes
``aerie.hidden_states.parity``.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, iterate_rows
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.state_files import read_states
from aerie.errors import Failed
from aerie.hidden_states.verifier_ends import HEAD, NORM, read_ends, text_configuration

ROWS = 64
POSITIONS_PER_ROW = 32

MINIMUM_AGREEMENT = 0.3
"""Measured on the demo: 0.97; with states of another model 0.001, of the position before or behind 0.01."""

NORM_BAND = 0.02
"""How far from 1 the root mean square of a state after the norm, in bfloat16, may be."""
MAXIMUM_AFTER_NORM = 0.5
"""Measured on the demo: 0; with states after the norm 1."""


@dataclass(frozen=True)
class LastSlot:
    """Of ``tokens`` response tokens, the share that the head names first, and the share of states after the norm."""

    tokens: int
    agreement: float
    after_norm: float

    @property
    def problem(self) -> str | None:
        """Why these are not the verifier's states before the norm, None where they are."""
        if self.after_norm > MAXIMUM_AFTER_NORM:
            return (
                f"the last layer's states were captured after the final norm: {self.after_norm:.0%} of {self.tokens} "
                "have exactly its magnitude, and a server hands over those before it"
            )
        if self.agreement < MINIMUM_AGREEMENT:
            return (
                f"the verifier's head, on the last layer's states, names {self.agreement:.1%} of {self.tokens} "
                f"response tokens first, where its own states name most (at least {MINIMUM_AGREEMENT:.0%} expected): "
                "these are another model's states, or of other positions"
            )
        return None


def spaced_rows(files: EditionFiles, rows: int) -> Iterator[CorpusRow]:
    """Some of the corpus' ``rows``, evenly spaced."""
    return islice(iterate_rows(files.corpus / DATASET_FOLDER), 0, None, -(-rows // ROWS))


def measure_last_slot(rows: Iterable[CorpusRow], path_of: Callable[[CorpusRow], Path], verifier: Path) -> LastSlot:
    """Read the last slot of ``rows``, whose files are at ``path_of``, with the head of the checkpoint ``verifier``.

    Raises:
        BadInput: the checkpoint has no head or norm that can be read.
        Failed: a state file is missing or cannot be read.
    """
    ends = read_ends(verifier, text_configuration(verifier))
    head, norm = ends[HEAD], ends[NORM].float()
    tokens = agreeing = after_norm = 0
    for row in rows:
        targets = torch.from_numpy(_targets(row))
        last = read_states(path_of(row)).hidden_states[targets - 1, -1].float()
        # The norm's division does not change which token is first.
        first = ((last * norm).to(head.dtype) @ head.T).argmax(dim=1)
        magnitudes = (last / norm).square().mean(dim=1).sqrt()
        tokens += len(targets)
        agreeing += int((first == torch.from_numpy(row.input_ids.astype(np.int64))[targets]).sum())
        after_norm += int(((magnitudes - 1).abs() < NORM_BAND).sum())
    return LastSlot(tokens=tokens, agreement=round(agreeing / tokens, 4), after_norm=round(after_norm / tokens, 4))


def _targets(row: CorpusRow) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Some positions of response tokens, evenly spaced, int64; a first token has no state before it."""
    positions = np.flatnonzero(row.loss_mask[1:]) + 1
    return positions[:: -(-len(positions) // POSITIONS_PER_ROW)]


def require_last_slot(found: LastSlot, folder: Path) -> None:
    """Refuse states that the verifier's own norm and head do not read as its states.

    Raises:
        Failed: they were taken after the norm, or are another model's or of other positions.
    """
    if found.problem is not None:
        raise Failed(f"{folder}: {found.problem}; run capture again with --force")
