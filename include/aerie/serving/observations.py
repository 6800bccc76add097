"""What launches turned out to hold: written by the keeper beside its lease, read by whoever plans the next one.

``observations.jsonl`` in a server's folder, one launch a line. The store has the same documents
(``store/queries/observations.py``); this file is for hosts without a database, and for the keeper itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from aerie.artefacts.files import write_text
from aerie.errors import BadInput
from aerie.settings.profile import Frozen


class Observation(Frozen):
    """One launch: what was planned and what the server reported.

    Memory is in bytes of one rank, the tightest: of a GPU, or on a CPU of the host. ``max_total_tokens`` is the plan's
    cap, ``max_total_num_tokens`` what the server reported; ``predicted_max_total_num_tokens`` is None where nothing
    could be predicted. ``memory_left_bytes`` is what was free after graphs and buffers, None where the server does
    not say. ``observed_at`` is in seconds since 1970.
    """

    launch_token: str
    plan_fingerprint: str
    observed_at: float
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
    max_total_num_tokens: int
    memory_before_launch_bytes: int
    memory_left_bytes: int | None
    predicted_max_total_num_tokens: int | None

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
        text = observations_path(folder).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    return tuple(_observations(observations_path(folder), text))


def _observations(path: Path, text: str) -> Iterator[Observation]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield Observation.model_validate_json(line)
        except ValidationError as error:
            raise BadInput(f"{path}, line {number}: not an observation: {error}; remove the line") from error
