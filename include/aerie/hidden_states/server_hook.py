"""EAGLE-3 states from inside an unpatched SGLang server, in one prefill pass.

Runs in the server's scheduler process (``--forward-hooks``, see ``protocol.forward_hooks``). In each forward pass the
first decoder layer's hook notes which rows belong to which request; each norm's hook copies its rows at once, on the
compute stream, because on a GPU the norm works in place and the buffer is overwritten by later layers; the last norm's
hook hands the stacked rows to a writer thread, which assembles requests and writes each when every position of every
layer is there. A retracted request emits rows again: they land on the same positions. Only rank 0 captures.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerie.artefacts.files import write_json
from aerie.artefacts.state_files import state_path, write_states
from aerie.errors import Failed
from aerie.hidden_states.protocol import (
    BATCH_ROLE,
    CapturedRequest,
    failure_path,
    hook_failure_path,
    parse_request_id,
)

Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], None]
PENDING_FORWARDS = 16
"""Forward passes that may wait for the disk before the server waits too."""


@dataclass(frozen=True)
class Span:
    """Rows ``first:first + length`` of a forward pass, which are positions from ``position`` on of ``request``."""

    request: CapturedRequest
    position: int
    first: int
    length: int


@dataclass(frozen=True)
class Forward:
    """One forward pass on the host: token ids int64 [rows], states [rows, slots, H]; ready after ``copied``."""

    spans: tuple[Span, ...]
    token_ids: torch.Tensor
    states: torch.Tensor
    copied: torch.cuda.Event | None


class Assembly:
    """States of one request, filled as its chunks arrive."""

    def __init__(self, tokens: int, states: torch.Tensor) -> None:
        self.token_ids = torch.zeros(tokens, dtype=torch.int64)
        self.states = torch.zeros(tokens, *states.shape[1:], dtype=states.dtype)
        self._seen = torch.zeros(tokens, dtype=torch.bool)

    def add(self, position: int, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Put a chunk in its place."""
        chunk = slice(position, position + len(token_ids))
        self.token_ids[chunk] = token_ids
        self.states[chunk] = states
        self._seen[chunk] = True

    @property
    def complete(self) -> bool:
        """Whether every position has been seen."""
        return bool(self._seen.all())


class Writer:
    """Assembles requests and writes them, on its own thread."""

    def __init__(self, states: Path) -> None:
        self._states = states
        self._open: dict[str, Assembly] = {}
        self._forwards: queue.Queue[Forward] = queue.Queue(maxsize=PENDING_FORWARDS)
        threading.Thread(target=self._run, name="hidden-state-writer", daemon=True).start()

    def put(self, forward: Forward) -> None:
        """Queue one forward pass; waits when the disk is too far behind."""
        self._forwards.put(forward)

    def drain(self) -> None:
        """Wait until everything queued has been dealt with."""
        self._forwards.join()

    def _run(self) -> None:
        while True:
            forward = self._forwards.get()
            if forward.copied is not None:
                forward.copied.synchronize()
            for span in forward.spans:
                self._add(span, forward)
            self._forwards.task_done()

    def _add(self, span: Span, forward: Forward) -> None:
        request = span.request
        path = state_path(self._states, request.name)
        if path.exists():  # emitted again after it was written
            return
        assembly = self._open.setdefault(request.name, Assembly(request.tokens, forward.states))
        rows = slice(span.first, span.first + span.length)
        assembly.add(span.position, forward.token_ids[rows], forward.states[rows])
        if not assembly.complete:
            return
        del self._open[request.name]
        try:
            write_states(path, token_ids=assembly.token_ids, hidden_states=assembly.states)
        except Failed as error:
            report_failure(failure_path(self._states, request.name), str(error))


class Collector:
    """Collects the slots of one forward pass after another."""

    def __init__(self, states: Path, *, slots: int, dtype: torch.dtype) -> None:
        self._states = states
        self._slots = slots
        self._dtype = dtype
        self._writer = Writer(states)
        self._spans: tuple[Span, ...] = ()
        self._rows: torch.Tensor | None = None
        self._batch_rows = 0
        self._token_ids = torch.empty(0, dtype=torch.int64)
        self._collected: dict[int, torch.Tensor] = {}

    def drain(self) -> None:
        """Wait until everything collected has been written."""
        self._writer.drain()

    def note_batch(self, _module: torch.nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        """Hook of the first decoder layer: note which rows of this forward pass are captured."""
        self._collected = {}
        self._spans = ()
        batch = next((argument for argument in args if hasattr(argument, "rids")), None)
        if batch is None:
            report_failure(
                hook_failure_path(self._states),
                "the first decoder layer is called without a ForwardBatch among its positional arguments: this model's "
                "code in SGLang cannot be captured by hooks",
            )
            return
        if batch.extend_seq_lens_cpu is None:  # a decode step: no prompt rows
            return
        wanted, self._batch_rows = captured_spans(batch)
        if not wanted:
            return
        rows = torch.cat([torch.arange(span.first, span.first + span.length) for span in wanted])
        self._spans = packed(wanted)
        self._rows = rows.to(batch.input_ids.device)
        self._token_ids = batch.input_ids[self._rows].to(torch.int64)

    def collect(self, slot: int) -> Hook:
        """Hook of the norm whose second output is ``slot``."""

        def hook(_module: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if not self._spans:
                return
            if isinstance(output, tuple) and len(output) > 1 and len(output[1]) == self._batch_rows:
                # Indexing copies, here and now: a later layer overwrites the residual in place.
                self._collected[slot] = output[1].detach()[self._rows].to(self._dtype)
            if slot == self._slots - 1:
                self._finish_forward()

        return hook

    def _finish_forward(self) -> None:
        missing = [slot for slot in range(self._slots) if slot not in self._collected]
        if missing:
            for span in self._spans:
                report_failure(
                    failure_path(self._states, span.request.name),
                    f"slots {missing} of {self._slots} gave no residual of {self._batch_rows} rows: the module's name "
                    "matched nothing, the norm was fused away (all-reduce fusion) or the rows are scattered over ranks",
                )
            return
        states = torch.stack([self._collected[slot] for slot in range(self._slots)], dim=1)
        self._collected = {}
        token_ids, states = on_host(self._token_ids), on_host(states)
        copied = None
        if torch.cuda.is_available():
            copied = torch.cuda.Event()
            copied.record()
        self._writer.put(Forward(spans=self._spans, token_ids=token_ids, states=states, copied=copied))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory; from a GPU by a copy on the compute stream that may still be under way."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def captured_spans(batch: Any) -> tuple[list[Span], int]:
    """Spans of the captured requests in a batch that extends (SGLang's ``ForwardBatch``), and its number of rows.

    A chunk of a prompt starts at its prefix's length; rows past the prompt, in a mixed batch, are not wanted.
    """
    spans, first = [], 0
    for request_id, length, position in zip(
        batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True
    ):
        request = parse_request_id(request_id)
        if request is not None and position < request.tokens:
            wanted = min(length, request.tokens - position)
            spans.append(Span(request=request, position=position, first=first, length=wanted))
        first += length
    return spans, first


def packed(spans: list[Span]) -> tuple[Span, ...]:
    """The same spans when only their rows are kept, one after the other."""
    result, first = [], 0
    for span in spans:
        result.append(Span(request=span.request, position=span.position, first=first, length=span.length))
        first += span.length
    return tuple(result)


def report_failure(path: Path, reason: str) -> None:
    """Leave the reason where the client looks for it."""
    write_json(path, {"reason": reason})


_collectors: dict[str, Collector] = {}


def collector_of(config: Mapping[str, Any]) -> Collector:
    """The collector that the hooks of one capture share, by their folder of state files."""
    folder = config["states"]
    if folder not in _collectors:
        dtype: torch.dtype = getattr(torch, config["dtype"])
        _collectors[folder] = Collector(Path(folder), slots=config["slots"], dtype=dtype)
    return _collectors[folder]


def factory(config: Mapping[str, Any]) -> Hook | None:
    """Make the hook for one role of ``protocol.forward_hooks``; None, which registers none, on ranks but the first."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return None
    collector = collector_of(config)
    role = config["role"]
    return collector.note_batch if role == BATCH_ROLE else collector.collect(int(role.removeprefix("slot-")))
