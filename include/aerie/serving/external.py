"""A server that someone else owns: checked against the plan, used, and never started or stopped.

Without a launch token of ours, what tells one process from the next is what SGLang says of itself: its names, its
resolved settings, and among them what every start draws or measures anew (its random seed and how long it took to
start).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.artefacts.files import fingerprint_of
from aerie.serving.errors import ServerDied, WrongServer
from aerie.serving.plan import ServerPlan
from aerie.serving.probe import differences_from_plan, probe_replicas, server_info

IDENTITY_FIELDS = (
    "served_model_name", "model_path", "revision", "weight_version", "version", "dtype", "kv_cache_dtype",
    "max_total_num_tokens", "random_seed", "startup_time",
)  # fmt: skip
"""Of ``/server_info``: equal for as long as the same process answers."""


@dataclass(frozen=True)
class ExternalServer:
    """A server of somebody else's that is as planned. ``identity`` is a fingerprint of ``IDENTITY_FIELDS``."""

    url: str
    identity: str
    max_total_num_tokens: int


def examine(url: str, plan: ServerPlan, *, folder: Path) -> ExternalServer:
    """Require that the server at ``url`` is as planned, and answers as a healthy one.

    Args:
        url: where it answers.
        plan: what it must be.
        folder: where scores of first launches are kept.

    Raises:
        NotReady: it does not answer.
        WrongServer: it is another one than planned, or answers nonsense; the message names every difference.
    """
    info = server_info(url)
    differences = [
        *differences_from_plan(info, plan, launch_token=info.get("served_model_name", "missing")),
        *_hook_differences(info, plan),
    ]
    if differences:
        raise WrongServer(
            f"{url}/server_info: the server is not as planned: {'; '.join(differences)}. Have its owner start it as "
            f"./aerie plan shows for phase {plan.phase}, or correct the configuration"
        )
    probe_replicas(url, plan, info, version=str(info.get("weight_version")), folder=folder)
    return ExternalServer(url, _identity_of(info), int(info["max_total_num_tokens"]))


def require_same(url: str, identity: str) -> None:
    """Require that the server that was examined still answers.

    Raises:
        NotReady: it does not answer.
        ServerDied: another process answers: it was started anew, or replaced.
    """
    found = _identity_of(server_info(url))
    if found != identity:
        raise ServerDied(
            f"{url}: another server answers than the one that was checked ({found[:12]}, expected {identity[:12]}): "
            "its owner has started it anew; it is checked again when the task is tried again"
        )


def _identity_of(info: Mapping[str, Any]) -> str:
    return fingerprint_of({name: info.get(name) for name in IDENTITY_FIELDS})


def _hook_differences(info: Mapping[str, Any], plan: ServerPlan) -> list[str]:
    """Hooks write files: they must be there where the plan captures, and only then."""
    found = info.get("forward_hooks")
    hooks = json.loads(found) if isinstance(found, str) else found
    expected = [dict(hook) for hook in plan.forward_hooks]
    return [] if (hooks or []) == expected else [f"forward_hooks is {hooks!r}, expected {expected!r}"]
