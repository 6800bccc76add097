"""State files: hidden states of one sample, tied to its tokens, and the links by row that speculators reads.

``states/<name>.safetensors`` holds ``token_ids`` int64 [S] and ``hidden_states`` [S, L, H]; L slots are the auxiliary
layers, then the last layer before the final norm. ``hs_<row>.safetensors`` beside the folder are relative links, made
after the shuffle. Imports torch and safetensors only: the hook inside the server writes through this module. Stored as
fp8, a file has float8 states and ``hidden_states_scales`` float32 [S, 1, 1] as well, as hs_connectors makes and reads
them, and in its metadata what that lost.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from aerie.artefacts.files import atomic_path, sync_directory
from aerie.artefacts.state_names import SUFFIX as SUFFIX
from aerie.artefacts.state_names import state_name as state_name
from aerie.artefacts.state_names import state_path as state_path
from aerie.errors import Failed

FP8_SCALES = "hidden_states_scales"
FP8_ERROR = "fp8_error"


@dataclass(frozen=True)
class StateFile:
    """Token ids int64 [S] and hidden states [S, L, H], in bfloat16 where they are ``stored`` as fp8."""

    token_ids: torch.Tensor
    hidden_states: torch.Tensor
    stored: Literal["plain", "fp8"] = "plain"


def link_path(folder: Path, row: int) -> Path:
    """Path of the link for corpus row ``row``, as speculators names it."""
    return folder / f"hs_{row}{SUFFIX}"


def write_states(path: Path, *, token_ids: torch.Tensor, hidden_states: torch.Tensor) -> None:
    """Write one state file atomically; ``token_ids`` int64 [S], ``hidden_states`` [S, L, H].

    Raises:
        Failed: the disk refused.
    """
    _write(path, {"token_ids": token_ids.contiguous(), "hidden_states": hidden_states.contiguous()})


def compress_states(path: Path, states: StateFile) -> None:
    """Write a file's plain ``states`` anew as fp8, and in it what is lost, by slot [L].

    That is the norm of the difference over the norm, of the values that a trainer is handed. Needs hs_connectors.

    Raises:
        Failed: the disk refused.
    """
    from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

    plain = states.hidden_states
    compressed, scales = quantize_tensor_to_fp8(plain)
    lost = dequantize_fp8_tensor(compressed, scales).float() - plain.float()
    error = lost.norm(dim=(0, 2)) / plain.float().norm(dim=(0, 2))
    _write(
        path,
        {"token_ids": states.token_ids, "hidden_states": compressed, FP8_SCALES: scales},
        {FP8_ERROR: json.dumps(error.tolist())},
    )


def read_fp8_error(path: Path) -> tuple[float, ...] | None:
    """What a state file lost as fp8, by slot [L]; None where it is plain, or does not say, as files of before.

    Raises:
        Failed: it is missing or cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get(FP8_ERROR)
    except (SafetensorError, OSError) as error:
        raise Failed(f"{path.name}: cannot be read: {error}") from error
    return None if written is None else tuple(json.loads(written))


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    try:
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata)
    except (SafetensorError, OSError) as error:
        raise Failed(f"{path}: cannot be written: {error}") from error


def read_states(path: Path) -> StateFile:
    """Read one state file.

    Raises:
        Failed: the file is missing, truncated, or holds other tensors.
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise Failed(f"{path.name}: missing") from None
    except (SafetensorError, OSError) as error:
        raise Failed(f"{path.name}: cannot be read: {error}") from error
    if set(tensors) == {"token_ids", "hidden_states", FP8_SCALES}:
        from hs_connectors.fp8_utils import dequantize_fp8_tensor

        states = dequantize_fp8_tensor(tensors["hidden_states"], tensors[FP8_SCALES])
        return StateFile(token_ids=tensors["token_ids"], hidden_states=states, stored="fp8")
    if set(tensors) != {"token_ids", "hidden_states"}:
        raise Failed(f"{path.name}: expected token_ids and hidden_states; found {', '.join(sorted(tensors))}")
    return StateFile(token_ids=tensors["token_ids"], hidden_states=tensors["hidden_states"])


def token_ids_sha256(token_ids: Any) -> str:
    """SHA-256, in hex, of token ids as little-endian int32; takes a NumPy array [S]."""
    return hashlib.sha256(token_ids.astype("<i4").tobytes()).hexdigest()


def link_rows(folder: Path, states: Path, names: Sequence[str]) -> None:
    """Make ``hs_<row>`` links in ``folder`` to the state files ``names`` in row order, in place of any earlier links.

    Args:
        folder: where speculators looks.
        states: the folder of state files, inside ``folder``; the links are relative, so that both can move together.
        names: name of each row's state file.
    """
    for stale in folder.glob(f"hs_*{SUFFIX}"):
        stale.unlink()
    for row, name in enumerate(names):
        link_path(folder, row).symlink_to(state_path(states.relative_to(folder), name))
    sync_directory(folder)
