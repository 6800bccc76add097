"""EAGLE-3 states from inside an unpatched SGLang server, in one prefill pass.

Runs in the server's scheduler process (``--forward-hooks``, see ``protocol.forward_hooks``). In each forward pass the
first decoder layer's hook notes which rows belong to which request; each norm's hook copies its rows at once, on the
compute stream, because on a GPU the norm works in place and the buffer is overwritten by later layers; the last norm's
hook hands the stacked rows to a writer thread, which assembles requests and writes each when every position of every
layer is there. A retracted request emits rows again: they land on the same positions. Only rank 0 captures.

While generating, decode steps are taken, too. A sample's rows wait in memory until its client asks for them with a
request of prompt and response, of which the server computes the last token alone: the rest is in its cache.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerie.artefacts.files import write_json
from aerie.artefacts.state_files import state_path, write_states
from aerie.errors import Failed
from aerie.hidden_states.growing import Growing
from aerie.hidden_states.protocol import (
    BATCH_ROLE,
    CapturedRequest,
    GeneratedRequest,
    failure_path,
    hook_failure_path,
    parse_request_id,
)

Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], None]
PENDING_FORWARDS = 16
"""Forward passes that may wait for the disk before the server waits too."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """Rows ``first:first + length`` of a forward pass, which are positions from ``position`` on of ``request``."""

    request: CapturedRequest | GeneratedRequest
    position: int
    first: int
    length: int

    @property
    def rows(self) -> slice:
        """Its rows of the forward pass."""
        return slice(self.first, self.first + self.length)


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

    def __init__(self, states: Path, generated_bytes: int) -> None:
        self._states = states
        self._growing = Growing(generated_bytes)
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
            try:
                self._take(forward)
            except Exception as error:  # told to whoever waits; a thread that ended would block the server's scheduler
                logger.exception("the states of a forward pass are lost")
                report_failure(hook_failure_path(self._states), _fault(error))
            finally:
                self._forwards.task_done()

    def _take(self, forward: Forward) -> None:
        if forward.copied is not None:
            forward.copied.synchronize()
        for span in forward.spans:
            try:
                self._take_span(span, forward)
            except Exception as error:  # of this request alone: others are written all the same
                logger.exception("the states of %s are lost", span.request.name)
                report_failure(failure_path(self._states, span.request.name), _fault(error))

    def _take_span(self, span: Span, forward: Forward) -> None:
        match span.request:
            case CapturedRequest():
                self._add(span.request, span, forward)
            case GeneratedRequest():
                self._grow(span.request, span, forward)

    def _add(self, request: CapturedRequest, span: Span, forward: Forward) -> None:
        if state_path(self._states, request.name).exists():  # emitted again after it was written
            return
        assembly = self._open.setdefault(request.name, Assembly(request.tokens, forward.states))
        assembly.add(span.position, forward.token_ids[span.rows], forward.states[span.rows])
        if assembly.complete:
            del self._open[request.name]
            self._write(request.name, assembly.token_ids, assembly.states)

    def _grow(self, request: GeneratedRequest, span: Span, forward: Forward) -> None:
        rows = forward.states[span.rows].view(torch.uint8).reshape(span.length, -1)
        self._growing.add(request.key, span.position, forward.token_ids[span.rows].numpy(), rows.numpy())
        if request.tokens is None or span.position + span.length < request.tokens:
            return
        try:
            grown = self._growing.take(request.key, request.tokens)
        except Failed as error:
            report_failure(failure_path(self._states, request.name), str(error))
            return
        states = torch.from_numpy(grown.rows).view(forward.states.dtype)
        self._write(
            request.name,
            torch.from_numpy(grown.token_ids),
            states.reshape(request.tokens, *forward.states.shape[1:]),
        )

    def _write(self, name: str, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        try:
            write_states(state_path(self._states, name), token_ids=token_ids, hidden_states=states)
        except Failed as error:
            report_failure(failure_path(self._states, name), str(error))


def _fault(error: Exception) -> str:
    return f"the writer of states failed: {type(error).__name__}: {error}; see the server's log"


class Collector:
    """Collects the slots of one forward pass after another."""

    def __init__(self, states: Path, *, slots: int, dtype: torch.dtype, generated_bytes: int | None) -> None:
        self._states = states
        self._slots = slots
        self._dtype = dtype
        self._generated = generated_bytes is not None
        self._writer = Writer(states, generated_bytes or 0)
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
        wanted = list(self._wanted(batch))
        if not wanted:
            return
        self._batch_rows = len(batch.input_ids)
        rows = torch.cat([torch.arange(span.first, span.first + span.length) for span in wanted])
        self._spans = packed(wanted)
        self._rows = rows.to(batch.input_ids.device)
        self._token_ids = batch.input_ids[self._rows].to(torch.int64)

    def _wanted(self, batch: Any) -> Iterator[Span]:
        """Rows of the batch (SGLang's ``ForwardBatch``) that are captured."""
        extends = batch.extend_seq_lens_cpu is not None
        if not extends and not self._generated:  # a decode step has no rows of a prompt
            return
        for span in extended_spans(batch) if extends else decoded_spans(batch):
            if self._generated or isinstance(span.request, CapturedRequest):
                yield span

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
            self._report_missing(missing)
            return
        states = torch.stack([self._collected[slot] for slot in range(self._slots)], dim=1)
        self._collected = {}
        token_ids, states = on_host(self._token_ids), on_host(states)
        copied = None
        if torch.cuda.is_available():
            copied = torch.cuda.Event()
            copied.record()
        self._writer.put(Forward(spans=self._spans, token_ids=token_ids, states=states, copied=copied))

    def _report_missing(self, slots: list[int]) -> None:
        """Say which layers gave nothing: of what is generated once, because every step has all of it."""
        reason = (
            f"slots {slots} of {self._slots} gave no residual of {self._batch_rows} rows: the module's name "
            "matched nothing, the norm was fused away (all-reduce fusion) or the rows are scattered over ranks"
        )
        hook_failure = hook_failure_path(self._states)
        for span in self._spans:
            if isinstance(span.request, CapturedRequest):
                report_failure(failure_path(self._states, span.request.name), reason)
            elif not hook_failure.exists():
                report_failure(hook_failure, reason)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory; from a GPU by a copy on the compute stream that may still be under way."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def extended_spans(batch: Any) -> Iterator[Span]:
    """Spans of the captured requests in a batch that extends (SGLang's ``ForwardBatch``).

    A chunk of a prompt starts at its prefix's length; rows past the prompt, in a mixed batch, are wanted only of what
    is generated.
    """
    first = 0
    for request_id, length, position in zip(
        batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True
    ):
        request = parse_request_id(request_id)
        if request is not None:
            wanted = length if request.tokens is None else min(length, request.tokens - position)
            if wanted > 0:
                yield Span(request=request, position=position, first=first, length=wanted)
        first += length


def decoded_spans(batch: Any) -> Iterator[Span]:
    """Spans of the generated requests in a decode step, which feeds each its latest token."""
    lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
    for row, (request_id, length) in enumerate(zip(batch.rids, lengths.tolist(), strict=True)):
        request = parse_request_id(request_id)
        if isinstance(request, GeneratedRequest) and request.tokens is None:
            yield Span(request=request, position=length - 1, first=row, length=1)


def packed(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same spans when only their rows are kept, one after the other."""
    result, first = [], 0
    for span in spans:
        result.append(Span(request=span.request, position=span.position, first=first, length=span.length))
        first += span.length
    return tuple(result)


def report_failure(path: Path, reason: str) -> None:
    """Leave the reason where the client looks for it; what cannot be left there is in the server's log."""
    try:
        write_json(path, {"reason": reason})
    except OSError as error:  # a full disk: the server goes on, and the client hears nothing
        logger.error("%s cannot be written (%s); its reason: %s", path, error, reason)


_collectors: dict[str, Collector] = {}


def collector_of(config: Mapping[str, Any]) -> Collector:
    """The collector that the hooks of one capture share, by their folder of state files."""
    folder = config["states"]
    if folder not in _collectors:
        dtype: torch.dtype = getattr(torch, config["dtype"])
        _collectors[folder] = Collector(
            Path(folder), slots=config["slots"], dtype=dtype, generated_bytes=config.get("generated_bytes")
        )
    return _collectors[folder]


def factory(config: Mapping[str, Any]) -> Hook | None:
    """Make the hook for one role of ``protocol.forward_hooks``; None, which registers none, on ranks but the first."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return None
    collector = collector_of(config)
    role = config["role"]
    return collector.note_batch if role == BATCH_ROLE else collector.collect(int(role.removeprefix("slot-")))
