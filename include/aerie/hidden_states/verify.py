"""Verifying hidden states before a GPU hour is spent on them.

A mismatched cache trains silently (exit 0, loss 0.00), so every link that the trainer will read is compared with its
corpus row: tokens, shape, finite values, every row once, and magnitudes in a band, which finds blocks that a crash left
zeroed and states of another model that happen to fit.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, iterate_rows
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.state_files import SUFFIX, link_path
from aerie.errors import Failed
from aerie.hidden_states.check import CheckedState, check_state_file
from aerie.hidden_states.layers import CapturedLayers

MAGNITUDE_BAND = 10.0
"""A file is refused whose root mean square in some layer is this many times above or below the corpus' median."""

NAMED_FILES = 20
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class VerifiedStates:
    """What was verified."""

    rows: int
    tokens: int
    bytes: int


def verify(files: EditionFiles, layers: CapturedLayers) -> VerifiedStates:
    """Verify the hidden states of the edition's corpus.

    Raises:
        Failed: a file is missing, truncated, corrupted, of other tokens, of another shape, or off in magnitude, or a
            link belongs to no row; the message names the files.
    """
    checked, problems = check_rows(files, layers)
    problems += _magnitudes(checked) + _strangers(files.hidden_states, len(checked) + len(problems))
    if problems:
        named = "; ".join(problems[:NAMED_FILES])
        more = f"; and {len(problems) - NAMED_FILES} more" if len(problems) > NAMED_FILES else ""
        raise Failed(
            f"{files.hidden_states}: {len(problems)} state files are wrong: {named}{more}; run capture again with "
            "--force, it captures only what is wrong"
        )
    states = checked.values()
    return VerifiedStates(
        rows=len(checked), tokens=sum(state.tokens for state in states), bytes=sum(state.bytes for state in states)
    )


def check_rows(files: EditionFiles, layers: CapturedLayers) -> tuple[dict[int, CheckedState], list[str]]:
    """Check the link of every corpus row; return what passed by row, and the problem of each that did not."""

    def check(row: CorpusRow) -> CheckedState | str:
        try:
            return check_state_file(link_path(files.hidden_states, row.row), row.input_ids, layers)
        except Failed as failure:
            return f"{failure} (sample {row.sample_id})"

    checked: dict[int, CheckedState] = {}
    problems: list[str] = []
    rows = iterate_rows(files.corpus / DATASET_FOLDER)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for chunk in _chunks(rows):
            for row, outcome in zip(chunk, pool.map(check, chunk), strict=True):
                if isinstance(outcome, str):
                    problems.append(outcome)
                else:
                    checked[row.row] = outcome
    return checked, problems


def _chunks(rows: Iterator[CorpusRow]) -> Iterator[list[CorpusRow]]:
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        yield chunk


def _magnitudes(checked: dict[int, CheckedState]) -> list[str]:
    if not checked:
        return []
    rows = list(checked)
    rms = np.array([checked[row].rms for row in rows])
    medians = np.median(rms, axis=0)
    off = ((rms > medians * MAGNITUDE_BAND) | (rms < medians / MAGNITUDE_BAND)).any(axis=1)
    return [
        f"hs_{rows[i]}{SUFFIX}: magnitudes {np.array2string(rms[i], precision=3)} are far from the corpus' medians "
        f"{np.array2string(medians, precision=3)}; remove the file it points to, so that it is captured again"
        for i in np.flatnonzero(off)
    ]


def _strangers(folder: Path, rows: int) -> list[str]:
    expected = {link_path(folder, row).name for row in range(rows)}
    return [
        f"{path.name}: belongs to no corpus row" for path in folder.glob(f"hs_*{SUFFIX}") if path.name not in expected
    ]
