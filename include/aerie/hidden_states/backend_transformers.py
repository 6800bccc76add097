"""Capture by a forward pass of transformers in this process, for any architecture that it loads.

Rows of one length share a pass: nothing is padded, no mask differs. Whether that changes a bit depends on the kernels
(a matrix product of few rows, or of the rows that an expert is given, may be summed in another order): the first shared
passes are computed row by row as well, and where one bit differs, every row is taken alone from there on. A pass is
written by threads while the next one runs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice

import numpy as np
import torch

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import write_states
from aerie.hidden_states.decoder import load_decoder, streams_of
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.record import CaptureRecord
from aerie.serving.client import require_unused
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest

SHARED_PASS_TOKENS = 16
"""Rows shorter than this are taken alone: products of so few rows take another path on CPUs."""

CHECKED_PASSES = 8
"""Shared passes that are compared with one row at a time."""

PASS_TOKENS = 16_384
"""Tokens of one forward pass, unless one row has more."""

ROWS_AT_ONCE = 65_536
"""Rows among which equal lengths are looked for."""

WRITERS = 4
PENDING_ROWS = 256
"""Rows that may wait for the disk before the model waits too."""


class TransformersBackend:
    """The verifier in this process, on the device and in the type that the settings serve it with."""

    def __init__(self, request: StageRequest, layers: CapturedLayers, events: Events) -> None:
        self._request = request
        self._layers = layers
        self._events = events

    def capture(self, rows: Iterator[CorpusRow], record: CaptureRecord) -> None:
        """As ``backends.Backend``.

        Raises:
            BadInput: transformers cannot load the verifier, or its layers cannot be told.
            Busy: another run's server has the GPUs.
            Failed: a state file cannot be written, or is not what it should be.
        """
        settings = self._request.settings
        if settings.serving.backend == "local" and settings.serving.device == "cuda":
            require_unused(self._request.server_folder, by=self._request.run_id)
        passes = Passes(settings, self._layers, self._events.progress)
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(WRITERS) as pool:
            for batch in _batches(rows, record, pool, limit=settings.hidden_states.concurrency):
                ids = torch.from_numpy(np.stack([row.input_ids for row in batch]).astype(np.int64))
                states = passes.states(ids)
                pending += [
                    pool.submit(_write, record, row, ids[number], states[number]) for number, row in enumerate(batch)
                ]
                while len(pending) > PENDING_ROWS:
                    pending.popleft().result()
                record.report_if_due()
            for written in pending:
                written.result()


class Passes:
    """Forward passes of the verifier; shared ones for as long as they change no bit."""

    def __init__(self, settings: PipelineSettings, layers: CapturedLayers, say: Callable[[str], None]) -> None:
        self._device = settings.serving.device
        self._decoder = load_decoder(settings, dtype=getattr(torch, settings.verifier.dtype), device=self._device)
        self._wanted = (*layers.auxiliary, layers.decoder_layers)
        self._dtype = getattr(torch, layers.dtype)
        self._say = say
        self._unchecked = CHECKED_PASSES
        self._shared = True

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """States [B, S, slots, H] of token ids int64 [B, S], on the host."""
        if len(ids) == 1 or (self._shared and not self._unchecked):
            return self._forward(ids)
        alone = torch.cat([self._forward(row[None]) for row in ids])
        if self._shared:
            self._unchecked -= 1
            self._shared = torch.equal(self._forward(ids), alone)
            if not self._shared:
                self._say("rows of one length change each other's last bits here: each row has a pass of its own")
        return alone

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), streams_of(self._decoder, self._wanted) as streams:
            self._decoder(ids.to(self._device), use_cache=False)
            states = torch.stack([streams[layer] for layer in self._wanted], dim=2)
            return states.to(self._dtype).cpu()


def _write(record: CaptureRecord, row: CorpusRow, ids: torch.Tensor, states: torch.Tensor) -> None:
    write_states(record.path_of(row), token_ids=ids, hidden_states=states)
    record.accept(row)


def _batches(
    rows: Iterator[CorpusRow], record: CaptureRecord, pool: ThreadPoolExecutor, *, limit: int
) -> Iterator[list[CorpusRow]]:
    """Rows without states, in batches of one length."""
    while window := list(islice(rows, ROWS_AT_ONCE)):
        present = pool.map(record.present, window)
        missing = [row for row, there in zip(window, present, strict=True) if not there]
        yield from equal_length_batches(missing, limit=limit)


def equal_length_batches(rows: Sequence[CorpusRow], *, limit: int) -> Iterator[list[CorpusRow]]:
    """Batches of at most ``limit`` rows of one length and ``PASS_TOKENS`` tokens, the longest first."""
    ordered = sorted(rows, key=lambda row: -len(row.input_ids))
    for length, group in groupby(ordered, key=lambda row: len(row.input_ids)):
        size = 1 if length < SHARED_PASS_TOKENS else max(1, min(limit, PASS_TOKENS // length))
        members = iter(group)
        while batch := list(islice(members, size)):
            yield batch
