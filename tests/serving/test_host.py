"""What a machine has: for real, and with GPUs from a stand-in for NVML."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from aerie.errors import Failed
from aerie.serving.host import host_facts, host_facts_of


class FakeNvml(SimpleNamespace):
    """pynvml on a machine with GPUs, or with faults, which no test machine has."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801 - pynvml's name
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801 - pynvml's name
        pass

    def __init__(self, *gpus: list[Any], fault: Exception | None = None, fault_later: Exception | None = None) -> None:
        super().__init__(gpus=gpus, fault=fault, fault_later=fault_later)

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
        return SimpleNamespace(total=96 * 2**30, used=2 * 2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return self.gpus[handle]


def test_this_machine_is_told_to_other_environments_as_to_itself() -> None:
    told = host_facts_of(Path(sys.executable))
    memory = psutil.virtual_memory()
    assert told.memory_total_bytes == memory.total
    assert 0 < told.memory_available_bytes < memory.total
    assert told.hostname == host_facts().hostname


def test_interpreter_that_cannot_tell_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named psutil' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(Failed, match="No module named psutil"):
        host_facts_of(broken)
    with pytest.raises(Failed, match=str(tmp_path / "nowhere")):
        host_facts_of(tmp_path / "nowhere")


def test_gpus_come_with_the_processes_that_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=2**30)
    gone = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)  # beyond the largest pid
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([mine, gone], []))
    first, second = host_facts().gpus
    assert (first.index, first.total_bytes, first.used_bytes) == (0, 96 * 2**30, 2 * 2**30)
    assert (first.processes[0].pid, first.processes[0].memory_bytes) == (os.getpid(), 2**30)
    assert first.processes[0].name == psutil.Process().name()
    assert first.processes[0].owner == psutil.Process().username()
    assert (first.processes[1].name, first.processes[1].owner, first.processes[1].memory_bytes) == (None, None, None)
    assert second.processes == ()


@pytest.mark.parametrize("fault", [FakeNvml.NVMLError_LibraryNotFound(), FakeNvml.NVMLError_DriverNotLoaded()])
def test_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fault=fault))
    assert host_facts().gpus == ()


def test_environment_without_nvml_sees_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert host_facts().gpus == ()


@pytest.mark.parametrize("when", ["fault", "fault_later"])
def test_gpus_that_do_not_answer_are_not_taken_for_none(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], **{when: FakeNvml.NVMLError("GPU is lost")}))
    with pytest.raises(Failed, match="GPU is lost"):
        host_facts()
