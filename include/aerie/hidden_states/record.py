"""What a capture has so far: which rows have good state files, and what every back end does with one that it wrote."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import compress_states, read_states, state_name, state_path
from aerie.errors import Failed
from aerie.hidden_states.check import CheckedState, check_state
from aerie.hidden_states.layers import CapturedLayers
from aerie.stages import Cadence

MEASURED_ROWS = 64
"""So few rows are over before a server is busy."""


@dataclass
class CaptureProgress:
    """What a capture has done so far."""

    captured_rows: int = 0
    captured_tokens: int = 0
    present_rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """From the first captured row to the last: the start of a server or a model is not in it."""

    @property
    def tokens_per_second(self) -> float | None:
        """Captured tokens a second; None where too few rows were captured to tell."""
        measured = self.captured_rows >= MEASURED_ROWS and self.seconds > 0
        return self.captured_tokens / self.seconds if measured else None


class CaptureRecord:
    """State files of one capture, as they are found or made; its methods may be called from any thread.

    Args:
        states: folder of the state files.
        layers: what each must hold.
        taken: called with each row and its checked state file.
        replaced: called with what is wrong with a file of an earlier run, which is captured again.
        report: called with the progress, every ``report_seconds`` and at the end.
    """

    def __init__(
        self,
        states: Path,
        layers: CapturedLayers,
        *,
        taken: Callable[[CorpusRow, CheckedState], None],
        replaced: Callable[[str], None],
        report: Callable[[CaptureProgress], None],
        report_seconds: float,
    ) -> None:
        self.states = states
        self.layers = layers
        self.progress = CaptureProgress()
        self.report_seconds = report_seconds
        self._taken = taken
        self._replaced = replaced
        self._report = report
        self._cadence = Cadence(report_seconds)
        self._first_at: float | None = None
        self._lock = threading.Lock()

    def path_of(self, row: CorpusRow) -> Path:
        """Path of the row's state file."""
        return state_path(self.states, state_name(row.sample_id))

    def present(self, row: CorpusRow) -> bool:
        """Whether an earlier run left the row's states; a file that is not good is named and removed."""
        path = self.path_of(row)
        if not path.exists():
            return False
        try:
            checked = self._checked(row)
        except Failed as failure:
            path.unlink()
            self._replaced(str(failure))
            return False
        with self._lock:
            self.progress.present_rows += 1
            self.progress.bytes += checked.bytes
            self._taken(row, checked)
        return True

    def accept(self, row: CorpusRow) -> None:
        """Check the state file that was just written for the row.

        Raises:
            Failed: it is not what it should be.
        """
        checked = self._checked(row)
        with self._lock:
            now = time.monotonic()
            self._first_at = now if self._first_at is None else self._first_at
            self.progress.seconds = now - self._first_at
            self.progress.captured_rows += 1
            self.progress.captured_tokens += checked.tokens
            self.progress.bytes += checked.bytes
            self._taken(row, checked)

    def _checked(self, row: CorpusRow) -> CheckedState:
        """Check a row's file; a plain one that is good is stored as fp8, where that is asked for."""
        path = self.path_of(row)
        state = read_states(path)
        if self.layers.storage == state.stored:
            return check_state(path, state, row.input_ids, self.layers)
        check_state(path, state, row.input_ids, replace(self.layers, storage="plain"))
        compress_states(path, state)
        return check_state(path, read_states(path), row.input_ids, self.layers)

    def report(self) -> None:
        """Report the progress."""
        self._report(self.progress)

    def report_if_due(self) -> None:
        """Report the progress where the last report is old enough."""
        if self._cadence.is_due():
            self.report()
