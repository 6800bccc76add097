"""What the capturing client and the hook inside the server agree on; no package is needed, both sides import it.

A request's id carries the name of its state file and its length in tokens, because the server shows a hook only the
chunk at hand: ``capture-<tokens>-<name>``. A sample that is being generated has no length yet: it is
``generate-<name>:<what makes the id unique>``, and the hook keeps its rows until a second request, of prompt and
response, asks for them: ``finish-<tokens>-<id of the first>``. Requests with other ids, such as warm-up, are ignored.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from aerie.artefacts.state_names import state_path

REQUEST_ID = re.compile(r"capture-(?P<tokens>\d+)-(?P<name>.+)")
GENERATED_ID = re.compile(r"(finish-(?P<tokens>\d+)-)?(?P<key>generate-(?P<name>[^:]+):.+)")
HOOK_FACTORY = "aerie.hidden_states.server_hook:factory"
BATCH_ROLE = "batch"
FILE_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class CapturedRequest:
    """A request whose states are wanted: the name of its state file, and how many tokens its prompt has."""

    name: str
    tokens: int

    @property
    def request_id(self) -> str:
        """Request id to send to the server."""
        return f"capture-{self.tokens}-{self.name}"


@dataclass(frozen=True)
class GeneratedRequest:
    """A request that generates a sample, or with ``tokens`` the one that asks for its states.

    ``key`` is the id of the generating request; ``name`` is that of the state file, without a colon.
    """

    key: str
    name: str
    tokens: int | None = None

    @property
    def request_id(self) -> str:
        """Request id to send to the server."""
        return self.key if self.tokens is None else f"finish-{self.tokens}-{self.key}"


def generated_key(name: str, unique: str) -> str:
    """Id of the request that generates the sample whose state file is called ``name``."""
    return f"generate-{name}:{unique}"


@lru_cache(maxsize=1 << 14)  # while generating, every request is looked at in every step
def parse_request_id(request_id: str) -> CapturedRequest | GeneratedRequest | None:
    """The captured request behind a request id, or None for any other request."""
    if matched := REQUEST_ID.fullmatch(request_id):
        return CapturedRequest(name=matched["name"], tokens=int(matched["tokens"]))
    if matched := GENERATED_ID.fullmatch(request_id):
        tokens = matched["tokens"]
        return GeneratedRequest(matched["key"], matched["name"], int(tokens) if tokens else None)
    return None


def failure_path(states: Path, name: str) -> Path:
    """Where the hook says why it could not capture ``name``; the client waits for it beside the state file."""
    return states / f"{name}.failed.json"


def hook_failure_path(states: Path) -> Path:
    """Where the hook says why it cannot capture anything."""
    return states / "hook.failed.json"


async def why_not_written(states: Path, name: str, *, seconds: float) -> str | None:
    """Wait until the hook has written the state file ``name``; None then, else why it has not."""
    path = state_path(states, name)
    deadline = time.monotonic() + seconds
    while not path.exists():
        for told in (failure_path(states, name), hook_failure_path(states)):
            if told.exists():
                return f"the hook inside the server could not capture it: {_reason(told)}"
        if time.monotonic() > deadline:
            return (
                f"it was computed, but not written {seconds:.0f} s later: the server was not launched with Aerie's "
                "forward hooks, writes to another folder, or the hooked modules have other names (profile: "
                "module_prefix); see the server's log for 'No modules matched hook spec'"
            )
        await asyncio.sleep(FILE_POLL_SECONDS)
    return None


def _reason(told: Path) -> str:
    return str(json.loads(told.read_text(encoding="utf-8"))["reason"])


def forward_hooks(
    *,
    states: Path,
    module_prefix: str,
    layers: Sequence[int],
    dtype: Literal["bfloat16", "float32"],
    generated_bytes: int | None = None,
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
        generated_bytes: memory for the rows of samples that are being generated; None where none are captured.
    """
    config: dict[str, Any] = {"states": str(states), "slots": len(layers) + 1, "dtype": dtype}
    if generated_bytes is not None:
        config["generated_bytes"] = generated_bytes
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
