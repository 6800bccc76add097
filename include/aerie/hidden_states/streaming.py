"""When hidden states are streamed instead of kept, and what the disk limit must hold. Arithmetic only.

A corpus whose states would take more than ``hidden_states.disk_limit_gib`` is streamed: the trainer gets them in the
order in which it asks (``aerie.training.stream_order``), chunk by chunk, and each file is removed once it is read. A
chunk takes at most half of the limit, so that one is captured while the other is trained on. A chunk is begun when
what is still unread leaves room for all of it; with nothing unread it always fits. Since files appear in the order in
which they are read, what the trainer waits for is never behind something that waits for the trainer.
"""

import math

from aerie.artefacts.manifest import Manifest
from aerie.errors import BadInput
from aerie.hidden_states.layers import CapturedLayers
from aerie.settings.pipeline import PipelineSettings

STREAMED = "streamed"
GIB = 1 << 30
TOKEN_ID_BYTES = 8
FILE_OVERHEAD_BYTES = 8192
"""At most: the header of a state file (about 200 bytes), and rounding up to whole blocks of the disk."""


def is_streamed(captured: Manifest) -> bool:
    """Whether the capture was proved on a sample only, so that training streams the states."""
    return captured.counts.get("mode") == STREAMED


def file_bytes(tokens: int, layers: CapturedLayers) -> int:
    """Bytes that the state file of a row of ``tokens`` tokens takes on the disk, at most."""
    return tokens * (layers.bytes_per_token + TOKEN_ID_BYTES) + FILE_OVERHEAD_BYTES


def disk_limit_bytes(settings: PipelineSettings) -> int | None:
    """``hidden_states.disk_limit_gib`` in bytes; None: no limit."""
    limit = settings.hidden_states.disk_limit_gib
    return None if limit is None else int(limit * GIB)


def window_bytes(settings: PipelineSettings, layers: CapturedLayers, *, tokens: int, rows: int) -> int | None:
    """Bytes that the states may take when this corpus is streamed; None when all of them are kept on the disk.

    Raises:
        BadInput: the limit cannot hold what the trainer asks for at once, with the sum; or the back end cannot stream.
    """
    limit = disk_limit_bytes(settings)
    everything = tokens * (layers.bytes_per_token + TOKEN_ID_BYTES) + rows * FILE_OVERHEAD_BYTES
    if limit is None or everything <= limit:
        return None
    backend = settings.hidden_states.backend
    if backend != "sglang":
        raise BadInput(
            f"hidden_states.disk_limit_gib {settings.hidden_states.disk_limit_gib:g} is less than all states take, "
            f"{everything / GIB:.3g} GiB, but only the back end sglang streams them; hidden_states.backend is {backend}"
        )
    if layers.storage != "plain":
        raise BadInput(
            f"hidden_states.disk_limit_gib {settings.hidden_states.disk_limit_gib:g} is less than all states take, "
            f"{everything / GIB:.3g} GiB, but states that are streamed are stored plain; hidden_states.storage is "
            f"{layers.storage}, which spares nothing that is not kept"
        )
    training = settings.training
    step = training.processes * file_bytes(training.sequence_length, layers)
    if limit < 2 * step:
        raise BadInput(
            f"hidden_states.disk_limit_gib {settings.hidden_states.disk_limit_gib:g} is {limit:,} bytes, but states "
            f"are captured for one training step while the one before is read: 2 x {training.processes} processes x "
            f"({training.sequence_length:,} tokens x {layers.bytes_per_token + TOKEN_ID_BYTES:,} bytes + "
            f"{FILE_OVERHEAD_BYTES:,}) = {2 * step:,}; set it to {math.ceil(2 * step / GIB * 1e4) / 1e4:g} or more, or "
            "lower training.sequence_length"
        )
    return limit
