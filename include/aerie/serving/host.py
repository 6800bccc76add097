"""What a machine has for a server: its memory, and its GPUs with the processes that hold them.

``python -m aerie.serving.host`` prints the facts as JSON, for environments that cannot ask NVML themselves.
"""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from aerie.errors import Failed
from aerie.settings.profile import Frozen

INCLUDE = Path(__file__).resolve().parents[2]
CGROUP = Path("/sys/fs/cgroup")
ANSWER_SECONDS = 60.0


class GpuProcess(Frozen):
    """A process that holds memory of a GPU; ``None`` is what the driver or the kernel does not tell."""

    pid: int
    name: str | None
    owner: str | None
    memory_bytes: int | None


class Gpu(Frozen):
    """A GPU of this machine as NVML sees it."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...]


class HostFacts(Frozen):
    """A machine, or a container's part of it: memory, and GPUs, none where NVML or a driver is missing."""

    hostname: str
    memory_total_bytes: int
    memory_available_bytes: int
    gpus: tuple[Gpu, ...]


def host_facts() -> HostFacts:
    """The machine of this process. pynvml is in the serve environment only.

    Raises:
        Failed: there are GPUs, and NVML does not answer for them.
    """
    total = psutil.virtual_memory().total
    return HostFacts(
        hostname=socket.gethostname(),
        memory_total_bytes=min(total, _container("memory.max") or total),
        memory_available_bytes=memory_available_bytes(),
        gpus=_gpus(),
    )


def memory_available_bytes() -> int:
    """Memory that processes can still take here: the machine's, or what the container's limit leaves of it."""
    available = psutil.virtual_memory().available
    limit, used = _container("memory.max"), _container("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def host_facts_of(python: Path) -> HostFacts:
    """The machine of this process, as another environment's interpreter sees it.

    Raises:
        Failed: the interpreter cannot say; the message holds its last words.
    """
    command = [str(python), "-m", "aerie.serving.host"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_SECONDS,
            env={**os.environ, "PYTHONPATH": str(INCLUDE)},
        )
        done.check_returncode()
        return HostFacts.model_validate_json(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Failed(f"{' '.join(command)}: ended with status {error.returncode}: {last}") from error
    except (OSError, subprocess.TimeoutExpired, ValidationError) as error:
        raise Failed(f"{' '.join(command)}: expected the machine's facts as JSON: {error}") from error


def _container(name: str) -> int | None:
    """A figure of the container's limits; None where there is no such file, or no number ("max")."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gpus() -> tuple[Gpu, ...]:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ModuleNotFoundError:
        return ()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return ()
    except nvml.NVMLError as error:
        raise Failed(
            f"NVML cannot be asked about the GPUs: {error}; see that nvidia-smi works for this user"
        ) from error
    try:
        return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        raise Failed(f"NVML does not answer about the GPUs: {error}; see that nvidia-smi works") from error
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        used_bytes=memory.used,
        processes=tuple(_process(one) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


def _process(running: Any) -> GpuProcess:
    """NVML gives the host's pids: in a container they may not be found, and then only the memory is known."""
    name = owner = None
    try:
        process = psutil.Process(running.pid)
        name, owner = process.name(), process.username()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass
    return GpuProcess(pid=running.pid, name=name, owner=owner, memory_bytes=running.usedGpuMemory)


if __name__ == "__main__":
    sys.stdout.write(host_facts().model_dump_json() + "\n")
