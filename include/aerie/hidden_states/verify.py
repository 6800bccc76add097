"""Verifying hidden states before a GPU hour is spent on them.

A mismatched cache trains silently (exit 0, loss 0.00), so every link that the trainer will read is compared with its
corpus row: tokens, shape, finite values, every row once, and magnitudes in a band, which finds blocks that a crash left
zeroed and states of another model that happen to fit. Wrong files are named and removed, so that capture takes them
again, and only them.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, iterate_batches, iterate_rows
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.state_files import SUFFIX, link_path, state_name, state_path
from aerie.errors import Failed
from aerie.hidden_states.check import CheckedState, check_state_file
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.magnitudes import MAGNITUDE_BAND as MAGNITUDE_BAND
from aerie.hidden_states.magnitudes import Magnitude, far_from_others
from aerie.stages import Cadence, Events

NAMED_FILES = 20
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class VerifiedStates:
    """What was verified."""

    rows: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Verified:
    """A corpus row, and its state file: checked, or what is wrong with it."""

    row: int
    sample_id: str
    dataset: str
    outcome: CheckedState | str


def verify(files: EditionFiles, layers: CapturedLayers, events: Events, *, progress_seconds: float) -> VerifiedStates:
    """Verify the hidden states of the edition's corpus; remove those that are wrong, unless most are.

    Every byte is read, which may take hours: how far it is is reported every ``progress_seconds``.

    Raises:
        Failed: a file is missing, truncated, corrupted, of other tokens, of another shape, or off in magnitude, or a
            link belongs to no row; the message names the files.
    """
    rows = list(_reported(files, verify_rows(files, layers), events, every_seconds=progress_seconds))
    checked = {one.row: one.outcome for one in rows if isinstance(one.outcome, CheckedState)}
    far = far_from_others(
        Magnitude(one.row, one.dataset, one.outcome.rms) for one in rows if isinstance(one.outcome, CheckedState)
    )
    wrong = {one: _problem(files, one, far) for one in rows if one.row in far or isinstance(one.outcome, str)}
    strangers = list(_strangers(files.hidden_states, len(rows)))
    if wrong or strangers:
        raise Failed(_told(files, [*wrong.values(), *strangers], _remove(files, list(wrong), len(rows))))
    return VerifiedStates(
        rows=len(checked),
        tokens=sum(state.tokens for state in checked.values()),
        bytes=sum(state.bytes for state in checked.values()),
    )


def verify_rows(files: EditionFiles, layers: CapturedLayers) -> Iterator[Verified]:
    """Check the link of every corpus row, in order."""

    def check(row: CorpusRow) -> CheckedState | str:
        try:
            return check_state_file(link_path(files.hidden_states, row.row), row.input_ids, layers)
        except Failed as failure:
            return str(failure)

    rows = iterate_rows(files.corpus / DATASET_FOLDER)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            for row, outcome in zip(chunk, pool.map(check, chunk), strict=True):
                yield Verified(row.row, row.sample_id, row.dataset, outcome)


def _reported(
    files: EditionFiles, rows: Iterator[Verified], events: Events, *, every_seconds: float
) -> Iterator[Verified]:
    """The same rows; how many there were is reported meanwhile."""
    of_rows = sum(batch.num_rows for batch in iterate_batches(files.corpus / DATASET_FOLDER))
    read_bytes, cadence = 0, Cadence(every_seconds)
    for done, one in enumerate(rows, start=1):
        read_bytes += one.outcome.bytes if isinstance(one.outcome, CheckedState) else 0
        if cadence.is_due():
            events.progress(
                f"verified the hidden states of {done} of {of_rows} rows, {read_bytes} bytes",
                rows=done,
                of_rows=of_rows,
                bytes=read_bytes,
            )
        yield one


def _problem(files: EditionFiles, one: Verified, far: Mapping[int, str]) -> str:
    told = f"{link_path(files.hidden_states, one.row).name}: {far[one.row]}" if one.row in far else one.outcome
    return f"{told} (sample {one.sample_id})"


def _told(files: EditionFiles, problems: list[str], removed: int) -> str:
    named = "; ".join(problems[:NAMED_FILES])
    more = f"; and {len(problems) - NAMED_FILES} more" if len(problems) > NAMED_FILES else ""
    todo = (
        f"{removed} of them are removed: run capture again, it captures only what is missing"
        if removed
        else "none is removed: run capture again, with --force where it finds nothing to do"
    )
    return f"{files.hidden_states}: {len(problems)} state files are wrong: {named}{more}; {todo}"


def _remove(files: EditionFiles, wrong: list[Verified], rows: int) -> int:
    """Remove the wrong rows' own files, and return how many; where most rows are wrong, the files are not to blame.

    A link to another row's file is of an earlier shuffle: it says nothing of either file.
    """
    if 2 * len(wrong) > rows:
        return 0
    removed = 0
    for one in wrong:
        own = state_path(files.states, state_name(one.sample_id))
        if own.is_file() and link_path(files.hidden_states, one.row).resolve() == own.resolve():
            own.unlink()
            removed += 1
    return removed


def _strangers(folder: Path, rows: int) -> Iterator[str]:
    expected = {link_path(folder, row).name for row in range(rows)}
    for path in folder.glob(f"hs_*{SUFFIX}"):
        if path.name not in expected:
            yield f"{path.name}: belongs to no corpus row"
