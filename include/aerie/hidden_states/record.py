"""What a capture has so far: which rows have good state files, and what every back end does with one that it wrote."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import state_name, state_path
from aerie.errors import Failed
from aerie.hidden_states.check import CheckedState, check_state_file
from aerie.hidden_states.layers import CapturedLayers


@dataclass
class CaptureProgress:
    """What a capture has done so far."""

    captured_rows: int = 0
    captured_tokens: int = 0
    present_rows: int = 0
    bytes: int = 0


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
        self._reported_at = time.monotonic()
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
            checked = check_state_file(path, row.input_ids, self.layers)
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
        checked = check_state_file(self.path_of(row), row.input_ids, self.layers)
        with self._lock:
            self.progress.captured_rows += 1
            self.progress.captured_tokens += checked.tokens
            self.progress.bytes += checked.bytes
            self._taken(row, checked)

    def report(self) -> None:
        """Report the progress."""
        self._reported_at = time.monotonic()
        self._report(self.progress)

    def report_if_due(self) -> None:
        """Report the progress where the last report is old enough."""
        if time.monotonic() - self._reported_at >= self.report_seconds:
            self.report()
