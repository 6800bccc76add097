"""Capture by hooks inside an unpatched SGLang server: the kernels and the quantisation that serve."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from aerie.artefacts.corpus import CorpusRow
from aerie.hidden_states.client import Capture, CaptureTarget
from aerie.hidden_states.launch import capture_hooks
from aerie.hidden_states.record import CaptureRecord
from aerie.serving.client import ServerHandle, renew
from aerie.serving.configured import ensure_for_stage, plan_configured
from aerie.stages import Events, StageRequest

ROWS_AT_ONCE = 64


class SglangBackend:
    """Has a server of phase ``capture`` whose hooks write into the edition's folder of state files."""

    def __init__(self, request: StageRequest, events: Events) -> None:
        self._request = request
        self._events = events

    def capture(self, rows: Iterator[CorpusRow], record: CaptureRecord) -> None:
        """As ``backends.Backend``.

        Raises:
            BadInput: the settings cannot work in this phase.
            AerieError: the server does not come up (``aerie.serving.client.ensure_server``), or as ``Capture.run``.
        """
        missing = next_missing(rows, record)
        if not missing:  # no server is started to capture nothing
            return
        settings = self._request.settings
        handle = ensure_capture_server(self._request, self._events)
        target = CaptureTarget(
            url=handle.url,
            concurrency=settings.hidden_states.concurrency,
            request_timeout_seconds=settings.generation.request_timeout_seconds,
        )

        def renew_lease() -> None:
            renew(handle, lease_seconds=settings.serving.lease_seconds)

        Capture(target, record, renew_lease).run(chain(missing, rows))


def next_missing(rows: Iterator[CorpusRow], record: CaptureRecord) -> list[CorpusRow]:
    """Rows without good states, of the first few rows that have such ones; empty where all that are left are there."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            missing = [row for row, there in zip(some, pool.map(record.present, some), strict=True) if not there]
            if missing:
                return missing
            record.report_if_due()
    return []


def ensure_capture_server(request: StageRequest, events: Events) -> ServerHandle:
    """Have a server of phase ``capture`` whose hooks write into the edition's folder of state files.

    Raises:
        BadInput: the settings cannot work in this phase.
        AerieError: the server does not come up (``aerie.serving.client.ensure_server``).
    """
    plan = plan_configured(request.settings, "capture", forward_hooks=capture_hooks(request))
    return ensure_for_stage(request, plan, events)
