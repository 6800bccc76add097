"""Capturing rows with the back end that the settings ask for, and again those whose states are far from the others'."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import state_name, state_path, token_ids_sha256
from aerie.artefacts.state_index import MeasuredState
from aerie.errors import Failed
from aerie.hidden_states.backends import backend_of
from aerie.hidden_states.check import CheckedState
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.magnitudes import Magnitude, far_from_others
from aerie.hidden_states.record import CaptureProgress, CaptureRecord
from aerie.stages import Events, StageRequest

RENEWALS_PER_LEASE = 4
NAMED_ROWS = 20


@dataclass(frozen=True)
class CapturedRows:
    """State files in row order, and how they came to be there."""

    states: list[MeasuredState]
    progress: CaptureProgress


def capture_rows(
    request: StageRequest,
    layers: CapturedLayers,
    events: Events,
    rows: Callable[[], Iterator[CorpusRow]],
    *,
    count: int,
) -> CapturedRows:
    """Have a good state file of each of ``count`` rows; rows whose magnitudes are off are captured once more.

    Args:
        request: the edition and the settings.
        layers: what is captured.
        events: where the progress is reported.
        rows: the rows, as often as they are asked for.
        count: how many they are.

    Raises:
        Failed: a row cannot be captured, or its magnitudes are off again.
        Retryable: the server stopped answering.
    """
    capturing = _Capturing(request, layers, events, count)
    capturing.run(rows())
    far = far_from_others(magnitudes(capturing.states.values()))
    if far:
        for row in far:
            path = request.files.hidden_states / capturing.states[row].file
            events.progress(f"captured again: {path.name}: {far[row]}")
            path.unlink()
        capturing.run(row for row in rows() if row.row in far)
        require_magnitudes(capturing.states.values())
    return CapturedRows(sorted(capturing.states.values(), key=lambda state: state.row), capturing.record.progress)


def magnitudes(states: Iterable[MeasuredState]) -> Iterator[Magnitude]:
    """Magnitudes of checked state files."""
    return (Magnitude(state.row, state.dataset, state.rms) for state in states)


def require_magnitudes(states: Iterable[MeasuredState]) -> None:
    """Refuse states of which some are far from the others.

    Raises:
        Failed: naming them.
    """
    by_row = {state.row: state for state in states}
    if far := far_from_others(magnitudes(by_row.values())):
        named = "; ".join(
            f"sample {by_row[row].sample_id}: {problem}" for row, problem in list(far.items())[:NAMED_ROWS]
        )
        raise Failed(
            f"captured twice, the states of {len(far)} rows stay far from the others: {named}; the verifier itself "
            "gives them, or the server is broken: look at these samples, and quarantine them if they are not to be kept"
        )


class _Capturing:
    """One record over all passes."""

    def __init__(self, request: StageRequest, layers: CapturedLayers, events: Events, count: int) -> None:
        self._request, self._layers, self._events, self._count = request, layers, events, count
        self.states: dict[int, MeasuredState] = {}
        settings = request.settings
        self.record = CaptureRecord(
            request.files.states,
            layers,
            taken=self._taken,
            replaced=lambda problem: events.progress(f"captured again: {problem}"),
            report=self._report,
            report_seconds=min(
                settings.generation.progress_seconds, settings.serving.lease_seconds / RENEWALS_PER_LEASE
            ),
        )

    def run(self, rows: Iterator[CorpusRow]) -> None:
        backend_of(self._request, self._layers, self._events).capture(rows, self.record)
        self.record.report()

    def _taken(self, row: CorpusRow, checked: CheckedState) -> None:
        files = self._request.files
        self.states[row.row] = MeasuredState(
            row=row.row,
            sample_id=row.sample_id,
            file=str(state_path(files.states, state_name(row.sample_id)).relative_to(files.hidden_states)),
            bytes=checked.bytes,
            tokens=checked.tokens,
            token_ids_sha256=token_ids_sha256(row.input_ids),
            dataset=row.dataset,
            rms=checked.rms,
        )

    def _report(self, progress: CaptureProgress) -> None:
        self._events.progress(
            f"captured {progress.captured_rows} rows ({progress.captured_tokens} tokens), {progress.present_rows} "
            f"were there, of {self._count}",
            rows=progress.captured_rows + progress.present_rows,
            of_rows=self._count,
            bytes=progress.bytes,
        )
        self._events.metric(captured_rows=len(self.states), captured_tokens=progress.captured_tokens)
