"""What the capturing client and the hook inside the server agree on; standard library only, both sides import it.

A request's id carries the name of its state file and its length in tokens, because the server shows a hook only the
chunk at hand: ``capture-<tokens>-<name>``. Requests with other ids, such as warm-up, are ignored.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

REQUEST_ID = re.compile(r"capture-(?P<tokens>\d+)-(?P<name>.+)")
HOOK_FACTORY = "aerie.hidden_states.server_hook:factory"
BATCH_ROLE = "batch"


@dataclass(frozen=True)
class CapturedRequest:
    """A request whose states are wanted: the name of its state file, and how many tokens its prompt has."""

    name: str
    tokens: int

    @property
    def request_id(self) -> str:
        """Request id to send to the server."""
        return f"capture-{self.tokens}-{self.name}"


def parse_request_id(request_id: str) -> CapturedRequest | None:
    """The captured request behind a request id, or None for any other request."""
    matched = REQUEST_ID.fullmatch(request_id)
    return CapturedRequest(name=matched["name"], tokens=int(matched["tokens"])) if matched else None


def failure_path(states: Path, name: str) -> Path:
    """Where the hook says why it could not capture ``name``; the client waits for it beside the state file."""
    return states / f"{name}.failed.json"


def hook_failure_path(states: Path) -> Path:
    """Where the hook says why it cannot capture anything."""
    return states / "hook.failed.json"


def forward_hooks(
    *, states: Path, module_prefix: str, layers: Sequence[int], dtype: Literal["bfloat16", "float32"]
) -> list[Mapping[str, Any]]:
    """Value of SGLang's ``--forward-hooks`` (as JSON) for capturing into ``states``.

    The second output of a layer's ``input_layernorm`` is the residual stream entering that layer; the second output of
    the final ``norm`` is the last layer's output before the norm. The first decoder layer's hook sees the batch: which
    rows are whose. The order of ``layers``, then the final norm, is the order of the slots in a state file.

    Args:
        states: folder of the state files, on a disk that client and server share.
        module_prefix: name of the decoder inside the server's model, for example ``model``.
        layers: ids of the auxiliary layers, each at least 1 (layer 0's norm has no second output).
        dtype: type of the stored states.
    """
    config = {"states": str(states), "slots": len(layers) + 1, "dtype": dtype}
    modules = {BATCH_ROLE: f"{module_prefix}.layers.0"}
    for slot, layer in enumerate(layers):
        modules[f"slot-{slot}"] = f"{module_prefix}.layers.{layer}.input_layernorm"
    modules[f"slot-{len(layers)}"] = f"{module_prefix}.norm"
    return [
        {
            "name": f"capture-{role}",
            "target_modules": [module],
            "hook_factory": HOOK_FACTORY,
            "config": {**config, "role": role},
        }
        for role, module in modules.items()
    ]
