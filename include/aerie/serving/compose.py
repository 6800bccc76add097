"""Planned servers as services of a Compose file, one a phase, each a profile of its own: one GPU set, one server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aerie.errors import BadInput
from aerie.serving.plan import Phase, ServerPlan

IMAGE = "aerie-sglang:0.1.0"
"""SGLang's image with the hooks of the capture (``docker/sglang.Dockerfile``)."""

PYTHON = Path("python3")
HEALTH = "import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/health', timeout=20)"


def compose_document(
    plans: Mapping[Phase, ServerPlan], *, default_port: int, gpus: int, host_ram_gb: float | None, states: Path
) -> dict[str, Any]:
    """A Compose file that serves each phase: ``docker compose --profile generate up``.

    Raises:
        BadInput: a plan is for a CPU.
    """
    return {
        "name": "aerie-serving",
        "services": {
            f"sglang-{phase}": _service(phase, plan, plan.port or default_port, gpus, host_ram_gb, states)
            for phase, plan in plans.items()
        },
    }


def _service(
    phase: Phase, plan: ServerPlan, port: int, gpus: int, host_ram_gb: float | None, states: Path
) -> dict[str, Any]:
    if plan.device != "cuda":
        raise BadInput(f"device is {plan.device}: a compose service is for GPUs; copy the command line instead")
    inside = plan.model_copy(update={"host": "0.0.0.0"})  # noqa: S104 - of the container; published on one address
    entry, module, name, *arguments = inside.command_line(PYTHON, port=port)
    resources: dict[str, Any] = {
        "reservations": {"devices": [{"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}]}
    }
    if host_ram_gb is not None:  # a cache of the wrong size has taken a whole host down
        resources["limits"] = {"memory": f"{int(host_ram_gb * 1e9)}b"}
    return {
        "image": IMAGE,
        "profiles": [phase],
        "init": True,
        "restart": "unless-stopped",
        "entrypoint": [entry, module, name],
        "command": [argument.replace("$", "$$") for argument in arguments],
        "environment": {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        "ports": [f"{plan.host}:{port}:{port}"],
        "volumes": [
            *(
                _bind(path, read_only=True)
                for path in (plan.model_path, *([plan.drafter.path] if plan.drafter else []))
            ),
            *([_bind(states, read_only=False)] if plan.forward_hooks else []),
        ],
        "shm_size": "32gb",
        "ulimits": {"memlock": -1, "stack": 67108864},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "healthcheck": {
            "test": ["CMD", str(PYTHON), "-c", HEALTH.format(port=port)],
            "interval": "30s",
            "timeout": "30s",
            "retries": 4,
            "start_period": "3600s",
        },
        "deploy": {"resources": resources},
    }


def _bind(path: Path, *, read_only: bool) -> dict[str, Any]:
    return {"type": "bind", "source": str(path), "target": str(path), "read_only": read_only}
