"""What a training with streamed states needs beside the trainer: a capturing server, and the GPUs shared out."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.manifest import Manifest
from aerie.errors import AerieError, BadInput, Retryable
from aerie.hidden_states.backend_sglang import ensure_capture_server
from aerie.hidden_states.client import ATTEMPTS, FILE_TIMEOUT_SECONDS, Capture, CaptureTarget
from aerie.hidden_states.launch import capture_hooks
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.record import CaptureRecord
from aerie.hidden_states.streaming import window_bytes
from aerie.serving.client import held, release, renew
from aerie.serving.configured import plan_configured
from aerie.stages import Cadence, Events, StageRequest
from aerie.training.checkpoints import Progress
from aerie.training.stream_order import StreamOrder
from aerie.training.streaming import StateStream, StreamedSoFar, StreamPlan, Taken

RENEWALS_PER_LEASE = 4


@dataclass(frozen=True)
class StreamedTraining:
    """What is streamed: the states of the corpus' rows in ``order``, as ``captured``, its manifest, proved."""

    corpus: Manifest
    captured: Manifest
    layers: CapturedLayers
    order: StreamOrder
    after: Progress | None


@contextmanager
def streamed_states(request: StageRequest, training: StreamedTraining, events: Events) -> Iterator[StateStream]:
    """Have a server that captures, and stream from it while the block runs the trainer.

    The server is ended when all went well or will go wrong again; where another try may do it, it stays for it.

    Raises:
        AerieError: the server does not come up, or is gone before the training ends.
        BadInput: ``hidden_states.disk_limit_gib`` is no longer what the capture was proved for.
    """
    handle = ensure_capture_server(request, events)
    lease_seconds = request.settings.serving.lease_seconds

    def renew_lease() -> None:
        renew(handle, lease_seconds=lease_seconds)

    target = CaptureTarget(
        url=handle.url,
        concurrency=request.settings.hidden_states.concurrency,
        request_timeout_seconds=request.settings.generation.request_timeout_seconds,
    )

    def capture(rows: Iterator[CorpusRow], taken: Taken) -> None:
        record = CaptureRecord(
            request.files.states,
            training.layers,
            taken=taken,
            replaced=lambda problem: events.progress(f"captured again: {problem}"),
            report=lambda _: None,
            report_seconds=lease_seconds / RENEWALS_PER_LEASE,
        )
        Capture(target, record, renew_lease).run(rows)

    plan = _plan(request, training)
    events.progress(
        f"streaming states in {plan.limit_bytes:,} bytes of {request.files.hidden_states}, from {handle.url}"
    )
    report = _Reporter(request, training, events)
    try:
        with held(handle, lease_seconds=lease_seconds), StateStream(plan, capture, report) as stream:
            yield stream
    except Retryable:
        raise
    except AerieError:
        _end_server(request)
        raise
    _end_server(request)


def _end_server(request: StageRequest) -> None:
    if request.settings.serving.external_url is None:
        release(request.server_folder, request.run_id)


def _plan(request: StageRequest, training: StreamedTraining) -> StreamPlan:
    counts = training.corpus.counts
    limit = window_bytes(request.settings, training.layers, tokens=counts["tokens"], rows=counts["rows"])
    if limit is None:
        raise BadInput(
            "the capture was proved for streaming, but hidden_states.disk_limit_gib now lets every state be kept: run "
            "forecast and capture again with --force, or set the limit as it was"
        )
    return StreamPlan(
        files=request.files,
        layers=training.layers,
        order=training.order,
        after=training.after,
        limit_bytes=limit,
        medians=tuple(training.captured.counts["median_rms"]),
        wait_seconds=ATTEMPTS * request.settings.generation.request_timeout_seconds + FILE_TIMEOUT_SECONDS,
    )


class _Reporter:
    """Every few seconds a progress line and a metric of what was handed over."""

    def __init__(self, request: StageRequest, training: StreamedTraining, events: Events) -> None:
        self._events = events
        self._uses = sum(1 for _ in training.order.uses(training.after))
        self._cadence = Cadence(request.settings.generation.progress_seconds, at_once=True)

    def __call__(self, so_far: StreamedSoFar) -> None:
        if not self._cadence.is_due() and so_far.rows < self._uses:
            return
        self._events.progress(
            f"streamed the states of {so_far.rows} of {self._uses} rows to come ({so_far.tokens} tokens), at most "
            f"{so_far.peak_bytes:,} bytes at once; the capture waited {so_far.waited_seconds:.0f} s for the trainer"
        )
        self._events.metric(streamed_rows=so_far.rows, streamed_tokens=so_far.tokens)


def trainer_gpus(request: StageRequest, *, visible: Sequence[str]) -> str | None:
    """``CUDA_VISIBLE_DEVICES`` of a trainer beside a capturing server; None where it may have every GPU.

    The server takes the first of the GPUs that are ``visible``, one a rank, the trainer those behind.

    Raises:
        BadInput: there are too few; the message holds the sum.
    """
    serving, processes = request.settings.serving, request.settings.training.processes
    if serving.device != "cuda" or serving.backend == "external" or request.keeper == "elsewhere":
        return None
    ranks = plan_configured(request.settings, "capture", forward_hooks=capture_hooks(request)).ranks
    if len(visible) < ranks + processes:
        raise BadInput(
            f"streamed states are captured while they are trained on: the server takes {ranks} GPUs and the trainer "
            f"{processes}, but this host has {len(visible)}; lower training.processes or the server's parallel sizes, "
            "run the server on another host, or leave hidden_states.disk_limit_gib out"
        )
    return ",".join(visible[ranks : ranks + processes])


def visible_gpus() -> list[str]:
    """GPUs that this process sees, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]
