"""Before a server is started: whether its files are whole, and what of the machine stands in its way."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat

from aerie.errors import BadInput
from aerie.ports import port_is_free
from aerie.serving.checkpoint_files import verify_checkpoint
from aerie.serving.errors import MachineNotReady
from aerie.serving.host import Gpu, GpuProcess, HostFacts, host_facts
from aerie.serving.launch_plan import require_gpus_hold
from aerie.serving.leftovers import end_leftovers, is_of
from aerie.serving.memory import LOADING_GB_PER_RANK, HostMemory, require_host_holds
from aerie.serving.plan import ServerPlan
from aerie.settings.profile import Frozen

GB = 10**9
GIB = 2**30
LOG_GB = 1.0
"""Room for a server's log: days of one line a batch, and a traceback of every rank."""

UNSEEN_GIB = 2.0
"""What a driver keeps for itself is less; more than that without a process is held by one that cannot be seen."""

SHARED_SERVICES = ("nvidia-cuda-mps",)
"""Names of processes that hold a little of a GPU for others, and belong there."""


class PreflightOptions(Frozen):
    """What a plan does not say: the host's memory as the settings give it, in GB of 10^9 bytes, and what may be done.

    ``reap_leftovers`` lets processes end that an earlier server of the same folder left on the GPUs.
    """

    host_ram_gb: PositiveFloat | None = None
    host_loading_gb: Annotated[float, Field(ge=0)] | None = None
    reap_leftovers: bool = False


AS_MEASURED = PreflightOptions()


def preflight(plan: ServerPlan, options: PreflightOptions, *, folder: Path) -> list[str]:
    """Require that a server of the plan can be started here and now; one line for each thing that was found or done.

    Args:
        plan: the server.
        options: what the settings say of the host.
        folder: of the server's lease and logs; no server of it runs.

    Raises:
        BadInput: a checkpoint's files are not whole; the message names them.
        PlanRefused: the hierarchical cache, or the states of what is generated, exceed this host's memory, or the
            server its GPUs'.
        MachineNotReady: the disk, the port, the memory or processes on the GPUs stand in the way.
        ProcessesLeft: leftovers survive.
    """
    _require_disk(folder)
    _require_port(plan)
    _require_files(plan)
    facts = host_facts()
    _require_host_memory(plan, options, facts)
    if plan.device == "cuda" and facts.gpus:
        require_gpus_hold(plan, _used(plan, facts.gpus), folder=folder)
    return list(_require_gpus(plan, options, facts, folder))


def _require_disk(folder: Path) -> None:
    free_gb = shutil.disk_usage(folder).free / GB
    if free_gb < LOG_GB:
        raise MachineNotReady(
            f"{folder}: {free_gb:.2f} GB are free on its disk, a server's log needs {LOG_GB:g}: make room"
        )


def _require_port(plan: ServerPlan) -> None:
    if plan.port is not None and not port_is_free(plan.port, plan.host):
        raise MachineNotReady(
            f"{plan.host}:{plan.port} is taken: stop what listens there, or set serving.port to another port"
        )


def _require_files(plan: ServerPlan) -> None:
    if problems := verify_checkpoint(plan.model_path):
        raise BadInput(
            f"the checkpoint is not whole: {'; '.join(problems)}. Correct verifier.path, or get the files again with "
            "./aerie fetch-model"
        )
    if plan.drafter is not None and (problems := verify_checkpoint(plan.drafter.path)):
        raise BadInput(f"the drafter is not whole: {'; '.join(problems)}. Export it again (stage export)")


def _require_host_memory(plan: ServerPlan, options: PreflightOptions, facts: HostFacts) -> None:
    """The cache of all ranks and states beside loading; without either, loading where it is known."""
    available_gb = min(facts.memory_available_bytes / GB, options.host_ram_gb or float("inf"))
    loading_gb = options.host_loading_gb
    hicache_gb = 0 if plan.phase == "capture" else plan.hicache_size_gb_per_rank or 0
    if plan.device == "cuda" and (hicache_gb or plan.host_states_bytes):
        memory = HostMemory(
            available_gb=round(available_gb, 1),
            loading_gb=LOADING_GB_PER_RANK * plan.ranks if loading_gb is None else loading_gb,
            ranks=plan.ranks,
            states_gb=plan.host_states_bytes / GB,
        )
        require_host_holds(memory, hicache_gb_per_rank=hicache_gb)
        return
    if loading_gb is not None and loading_gb > available_gb:
        raise MachineNotReady(
            f"loading takes {loading_gb:.1f} GB of this host's memory, {available_gb:.1f} GB are available: end what "
            "else runs here"
        )


def _require_gpus(plan: ServerPlan, options: PreflightOptions, facts: HostFacts, folder: Path) -> Iterator[str]:
    if not facts.gpus or plan.device == "cpu":
        why = "this machine has no GPU" if not facts.gpus else "the server takes no GPU"
        yield f"{why}: what holds the GPUs was not checked"
        return
    gpus = _used(plan, facts.gpus)
    if options.reap_leftovers and (
        leftovers := [one for gpu in gpus for one in gpu.processes if is_of(folder, one.pid)]
    ):
        end_leftovers(folder, {one.pid for one in leftovers})
        yield f"ended what an earlier server left on the GPUs: {_listed(gpus, leftovers)}"
        gpus = _used(plan, host_facts().gpus)
    if held := [one for gpu in gpus for one in gpu.processes if not (one.name or "").startswith(SHARED_SERVICES)]:
        raise MachineNotReady(
            f"the GPUs are held by other processes: {_listed(gpus, held)}. End them; those that an earlier server of "
            f"{folder} left are ended with ./aerie server reap, or before a start with serving.reap_leftovers"
        )
    if unseen := [gpu for gpu in gpus if not gpu.processes and gpu.used_bytes > UNSEEN_GIB * GIB]:
        raise MachineNotReady(
            "the GPUs are held by processes that cannot be seen from here (of another container?): "
            + ", ".join(f"{gpu.used_bytes / GIB:.1f} GiB of GPU {gpu.index}" for gpu in unseen)
        )
    yield f"nothing holds GPU {', '.join(str(gpu.index) for gpu in gpus)}"


def _used(plan: ServerPlan, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that the server will take: the first of those that are visible, all where they are named otherwise."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not all(name.strip().isdigit() for name in names):
        return list(gpus)
    visible = [gpu for gpu in gpus if not names or gpu.index in map(int, names)]
    return visible[: plan.ranks]


def _listed(gpus: Sequence[Gpu], processes: Sequence[GpuProcess]) -> str:
    return "; ".join(
        f"pid {one.pid} ({one.name or 'name not known'}, of {one.owner or 'an unknown owner'}) "
        + (
            f"{one.memory_bytes / GIB:.1f} GiB of GPU {gpu.index}"
            if one.memory_bytes is not None
            else f"GPU {gpu.index}"
        )
        for gpu in gpus
        for one in gpu.processes
        if one in processes
    )
