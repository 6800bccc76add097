"""Capturing rows in the order in which the trainer asks for them, under a disk limit (``hidden_states.streaming``)."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, CorpusRows
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.state_names import state_name, state_path
from aerie.artefacts.state_stream import (
    Stream,
    clear_stream,
    end_stream,
    hand_over,
    open_stream,
    sweep,
    unread_rows,
)
from aerie.errors import Failed
from aerie.hidden_states.check import CheckedState
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.magnitudes import MAGNITUDE_BAND
from aerie.hidden_states.streaming import file_bytes
from aerie.processes import ProcessIdentity
from aerie.training.checkpoints import Progress
from aerie.training.stream_order import StreamOrder, chunks

POLL_SECONDS = 0.05

Taken = Callable[[CorpusRow, CheckedState], None]
CaptureRows = Callable[[Iterator[CorpusRow], Taken], None]
"""Captures rows into the edition's folder of state files, and calls back with each that was checked."""


@dataclass(frozen=True)
class StreamPlan:
    """What is streamed: rows in ``order`` behind the checkpoint at ``after``, in at most ``limit_bytes`` of the disk.

    ``medians`` are the root mean squares of the slots [L] in the sample that ``capture`` proved.
    """

    files: EditionFiles
    layers: CapturedLayers
    order: StreamOrder
    after: Progress | None
    limit_bytes: int
    medians: tuple[float, ...]
    wait_seconds: float


@dataclass
class StreamedSoFar:
    """What was handed over, the most that the disk held at once, and how long the capture waited for the trainer."""

    rows: int = 0
    tokens: int = 0
    peak_bytes: int = 0
    waited_seconds: float = 0.0


class StateStream:
    """Captures on a thread of its own while the block runs, and leaves no state file behind.

    A chunk is begun when the limit has room for all of it beside what is unread: at most half of the limit is being
    captured, and what requests of an earlier, killed stream still write is at most as much.

    ``failure`` is why it ended early, which the trainer is told as well: it saves its state and ends. ``waiting_since``
    is since when (monotonic seconds) the trainer has all that there is room for, or no more will come; None while rows
    are captured that it may wait for.
    """

    def __init__(self, plan: StreamPlan, capture: CaptureRows, report: Callable[[StreamedSoFar], None]) -> None:
        self._plan = plan
        self._capture = capture
        self._report = report
        self._lengths = (*plan.order.train.lengths, *plan.order.validation.lengths)
        self._reserved: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="state-stream", daemon=True)
        self.so_far = StreamedSoFar()
        self.failure: Exception | None = None
        self.waiting_since: float | None = None

    def __enter__(self) -> Self:
        files = self._plan.files
        stream = Stream(producer=ProcessIdentity.of(os.getpid()), wait_seconds=self._plan.wait_seconds)
        open_stream(files.hidden_states, files.states, stream)
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        clear_stream(self._plan.files.hidden_states, self._plan.files.states)

    def _run(self) -> None:
        try:
            self._stream()
        except Exception as error:  # noqa: BLE001 - raised by whoever runs the trainer, once it has saved its state
            self.failure = error
            end_stream(self._plan.files.hidden_states, str(error))
        finally:
            self.waiting_since = time.monotonic()

    def _stream(self) -> None:
        plan = self._plan
        rows = CorpusRows(plan.files.corpus / DATASET_FOLDER)
        for chunk in chunks(plan.order.uses(plan.after), self._size, plan.limit_bytes // 2):
            if not self._make_room(chunk):
                return
            self._capture(self._until_stopped(rows[row] for row in chunk), self._hand_over)
            self._report(self.so_far)

    def _size(self, row: int) -> int:
        return file_bytes(self._lengths[row], self._plan.layers)

    def _make_room(self, chunk: list[int]) -> bool:
        """Wait until the limit has room for ``chunk``; False when the stream is to end."""
        began = self.waiting_since = time.monotonic()
        needed = sum(map(self._size, chunk))
        while True:
            unread = unread_rows(self._plan.files.hidden_states)
            held = {row: size for row, size in self._reserved.items() if row in unread}
            # A row that is still unread is of the epoch before.
            if sum(held.values()) + needed <= self._plan.limit_bytes and held.keys().isdisjoint(chunk):
                break
            if self._stop.wait(POLL_SECONDS):
                return False
        self.waiting_since = None
        self.so_far.waited_seconds += time.monotonic() - began
        sweep(self._plan.files.states)
        self._reserved = held | {row: self._size(row) for row in chunk}
        self.so_far.peak_bytes = max(self.so_far.peak_bytes, sum(self._reserved.values()))
        return not self._stop.is_set()

    def _until_stopped(self, rows: Iterator[CorpusRow]) -> Iterator[CorpusRow]:
        for row in rows:
            if self._stop.is_set():
                return
            yield row

    def _hand_over(self, row: CorpusRow, checked: CheckedState) -> None:
        files = self._plan.files
        path = state_path(files.states, state_name(row.sample_id))
        if checked.bytes > self._reserved[row.row]:
            raise Failed(
                f"{path.name}: {checked.bytes:,} bytes, where {self._reserved[row.row]:,} were reserved for "
                f"{checked.tokens:,} tokens: hidden_states.disk_limit_gib would not hold"
            )
        require_magnitudes(path.name, checked.rms, self._plan.medians)
        hand_over(path, files.hidden_states, row.row)
        self.so_far.rows += 1
        self.so_far.tokens += checked.tokens


def require_magnitudes(name: str, rms: tuple[float, ...], medians: tuple[float, ...]) -> None:
    """Refuse states whose root mean square in some slot is far from that of the sample that ``capture`` proved.

    Raises:
        Failed: with both.
    """
    if any(
        not median / MAGNITUDE_BAND <= value <= median * MAGNITUDE_BAND
        for value, median in zip(rms, medians, strict=True)
    ):
        raise Failed(
            f"{name}: magnitudes {', '.join(f'{value:.3g}' for value in rms)} are far from those of the proven sample, "
            f"{', '.join(f'{value:.3g}' for value in medians)}: the server is another one, or a row is broken"
        )
