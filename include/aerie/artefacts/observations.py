"""What launches turned out to hold: written by the keeper beside its lease, read by whoever plans the next one.

``observations.jsonl`` in a server's folder, one launch a line. The store has the same documents
(``store/queries/observations.py``); this file is for hosts without a database, and for the keeper itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from aerie.artefacts.files import write_text
from aerie.errors import BadInput, one_line
from aerie.settings.profile import Frozen


class PlannedLaunch(Frozen):
    """What is known of a launch before it, as far as the KV pool's size depends on it.

    ``memory_before_launch_bytes`` is free memory of one rank, the tightest: of a GPU, or on a CPU of the host.
    ``max_total_tokens`` is the plan's cap.
    """

    plan_fingerprint: str
    model_identity: str
    drafter_identity: str | None
    hostname: str
    gpu_name: str | None
    sglang_version: str
    device: Literal["cuda", "cpu"]
    dtype: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    data_parallel_size: int
    attention_data_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel_size: int
    mem_fraction_static: float
    max_total_tokens: int | None
    page_size: int
    bytes_per_token: int
    memory_before_launch_bytes: int

    def is_of_same_server(self, other: "PlannedLaunch") -> bool:
        """Whether both have the same memory beside the KV pool: model, drafter, host, version and ranks are equal."""
        return all(getattr(self, name) == getattr(other, name) for name in SAME_SERVER)


SAME_SERVER = (
    "model_identity",
    "drafter_identity",
    "hostname",
    "gpu_name",
    "sglang_version",
    "device",
    "dtype",
    "tensor_parallel_size",
    "data_parallel_size",
    "attention_data_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
)
"""Fields that decide what is not KV pool. Its type is not among them: only the bytes per token depend on that."""


class Observation(PlannedLaunch):
    """One launch: what was planned, and what the server reported.

    ``taken_by_others_bytes`` is what other processes took of a CPU's memory while the server started, in terms of
    ``memory_before_launch_bytes``; on GPUs 0. ``memory_left_bytes`` is what one rank had free when graphs and buffers
    were there, None where the server does not say. ``observed_at`` is in seconds since 1970.
    """

    launch_token: str
    observed_at: float
    taken_by_others_bytes: int
    predicted_max_total_num_tokens: int
    max_total_num_tokens: int
    memory_left_bytes: int | None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool on one rank."""
        return self.max_total_num_tokens * self.bytes_per_token

    @property
    def undisturbed(self) -> PlannedLaunch:
        """The launch as if the memory read before it had lacked what other processes took after it was read."""
        memory = self.memory_before_launch_bytes - self.taken_by_others_bytes
        fields = self.model_dump(include=set(PlannedLaunch.model_fields))
        return PlannedLaunch.model_validate(fields | {"memory_before_launch_bytes": memory})

    @property
    def was_capped(self) -> bool:
        """Whether the plan's cap decided the pool, and not the memory: such a launch tells nothing about memory."""
        if self.max_total_tokens is None:
            return False
        return self.max_total_num_tokens >= self.max_total_tokens // self.page_size * self.page_size


def observations_path(folder: Path) -> Path:
    """The launches of a server's folder."""
    return folder / "observations.jsonl"


def append_observation(folder: Path, observation: Observation) -> None:
    """Add a launch. The folder's keeper alone writes here, and a crash leaves the old file or the new one."""
    path = observations_path(folder)
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, earlier + observation.model_dump_json() + "\n")


def read_observations(folder: Path) -> tuple[Observation, ...]:
    """The launches of a server's folder, oldest first; none where nothing was launched yet.

    Raises:
        BadInput: a line is not an observation; the message names it.
    """
    try:
        text = observations_path(folder).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise BadInput(f"{observations_path(folder)}: cannot be read: {error.strerror}") from error
    return tuple(_observations(observations_path(folder), text))


def _observations(path: Path, text: str) -> Iterator[Observation]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield Observation.model_validate_json(line)
        except ValidationError as error:
            raise BadInput(f"{path}, line {number}: not an observation: {one_line(error)}; remove the line") from error
