"""pynvml on a machine with GPUs, or with faults, which no test machine has."""

from types import SimpleNamespace
from typing import Any

import psutil

MAXIMUM_PID = 2**22
"""A larger one stands for a process that cannot be seen from here."""


class FakeNvml(SimpleNamespace):
    """The functions of pynvml that Aerie calls."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801 - pynvml's name
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801 - pynvml's name
        pass

    def __init__(
        self,
        *gpus: list[Any],
        used_bytes: int = 2**30,
        fault: Exception | None = None,
        fault_later: Exception | None = None,
    ) -> None:
        super().__init__(gpus=gpus, used_bytes=used_bytes, fault=fault, fault_later=fault_later)

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fault:
            raise self.fault

    def nvmlShutdown(self) -> None:  # noqa: N802
        return

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"GPU of the test {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if self.fault_later:
            raise self.fault_later
        return SimpleNamespace(total=96 * 2**30, used=self.used_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [one for one in self.gpus[handle] if one.pid > MAXIMUM_PID or _runs(one.pid)]


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def holding(pid: int, gib: float | None = 1.0) -> Any:
    """A process that holds memory of a GPU."""
    return SimpleNamespace(pid=pid, usedGpuMemory=None if gib is None else int(gib * 2**30))
