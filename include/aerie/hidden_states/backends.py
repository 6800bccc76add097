"""What computes hidden states, behind one interface."""

from collections.abc import Iterator
from typing import Protocol

from aerie.artefacts.corpus import CorpusRow
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.record import CaptureRecord
from aerie.stages import Events, StageRequest


class Backend(Protocol):
    """Captures rows."""

    def capture(self, rows: Iterator[CorpusRow], record: CaptureRecord) -> None:
        """Have a good state file of each row: one that is ``present``, or a new one that the record accepts.

        The record's progress is reported meanwhile. A file appears whole, by a rename.

        Raises:
            Failed: a row's states cannot be had.
            Retryable: they may be had by another try.
        """


def backend_of(request: StageRequest, layers: CapturedLayers, events: Events) -> Backend:
    """The back end that the settings ask for; only its own packages are imported."""
    match request.settings.hidden_states.backend:
        case "sglang":
            from aerie.hidden_states.backend_sglang import SglangBackend

            return SglangBackend(request, events)
        case "transformers":
            from aerie.hidden_states.backend_transformers import TransformersBackend

            return TransformersBackend(request, layers, events)
        case "vllm":
            from aerie.hidden_states.backend_vllm import VllmBackend

            return VllmBackend(request, layers, events)
