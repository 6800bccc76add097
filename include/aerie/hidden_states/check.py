"""Whether one state file is what it should be: the states of these tokens, whole and finite."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from aerie.artefacts.corpus import Int32Array
from aerie.artefacts.state_files import StateFile, read_states
from aerie.errors import Failed
from aerie.hidden_states.layers import CapturedLayers


@dataclass(frozen=True)
class CheckedState:
    """A state file that passed.

    ``rms`` is, for each slot [L], the root mean square of the states of its median token: a first token that draws
    attention may be a thousand times larger than the others, and would make short rows look large.
    """

    bytes: int
    tokens: int
    rms: tuple[float, ...]


def check_state_file(path: Path, input_ids: Int32Array, layers: CapturedLayers) -> CheckedState:
    """Check a state file against the tokens [S] it should belong to.

    Raises:
        Failed: it is missing or unreadable, belongs to other tokens, has another shape or type, or a value that is not
            finite; the message begins with the file's name.
    """
    state = read_states(path)
    return check_state(path, state, input_ids, layers)


def check_state(path: Path, state: StateFile, input_ids: Int32Array, layers: CapturedLayers) -> CheckedState:
    """Check what was read from ``path``, as ``check_state_file``.

    Raises:
        Failed: it is not what it should be.
    """
    _check_tokens(path, state, input_ids)
    expected = (len(input_ids), layers.slots, layers.hidden_size)
    if tuple(state.hidden_states.shape) != expected:
        raise Failed(
            f"{path.name}: hidden states of shape {list(state.hidden_states.shape)}; expected {list(expected)} "
            "(tokens, layers, hidden size)"
        )
    if state.hidden_states.dtype != getattr(torch, layers.dtype):
        raise Failed(f"{path.name}: hidden states are {state.hidden_states.dtype}; expected torch.{layers.dtype}")
    if state.stored != layers.storage:
        raise Failed(f"{path.name}: hidden states are stored {state.stored}; expected {layers.storage}")
    # One pass finds both: a value that is not finite, and a block that a crash left zeroed.
    norms = torch.linalg.vector_norm(state.hidden_states, dim=2, dtype=torch.float32)
    if not bool(torch.isfinite(norms).all()):
        raise Failed(f"{path.name}: hidden states hold a value that is not finite")
    if bool((norms == 0).any()):
        raise Failed(f"{path.name}: hidden states of some token are all zero")
    rms = norms.median(dim=0).values / layers.hidden_size**0.5
    return CheckedState(bytes=path.stat().st_size, tokens=len(input_ids), rms=tuple(rms.tolist()))


def _check_tokens(path: Path, state: StateFile, input_ids: Int32Array) -> None:
    found = state.token_ids.numpy()
    if np.array_equal(found, input_ids):
        return
    if len(found) != len(input_ids):
        raise Failed(f"{path.name}: states of {len(found)} tokens; the corpus row has {len(input_ids)}")
    first = int(np.flatnonzero(found != input_ids)[0])
    raise Failed(
        f"{path.name}: belongs to other tokens: id {found[first]} at position {first}, where the corpus row has "
        f"{input_ids[first]}"
    )
