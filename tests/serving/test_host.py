"""What a machine has: for real, and with GPUs from a stand-in for NVML."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from aerie.errors import Failed
from aerie.serving import host
from aerie.serving.host import host_facts, host_facts_of

from .fake_nvml import MAXIMUM_PID, FakeNvml, holding


def test_this_machine_is_told_to_other_environments_as_to_itself() -> None:
    told, here = host_facts_of(Path(sys.executable)), host_facts()
    assert (told.hostname, told.memory_total_bytes, told.gpus) == (here.hostname, here.memory_total_bytes, here.gpus)
    assert 0 < told.memory_available_bytes < told.memory_total_bytes <= psutil.virtual_memory().total


def test_container_has_the_memory_that_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    whole = host_facts()
    assert whole.memory_total_bytes == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("300000000\n")
    (tmp_path / "memory.current").write_text("100000000\n")
    bounded = host_facts()
    assert (bounded.memory_total_bytes, bounded.memory_available_bytes) == (300_000_000, 200_000_000)


def test_interpreter_that_cannot_tell_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named psutil' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(Failed, match="No module named psutil"):
        host_facts_of(broken)
    with pytest.raises(Failed, match=str(tmp_path / "nowhere")):
        host_facts_of(tmp_path / "nowhere")


def test_gpus_come_with_the_processes_that_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = holding(MAXIMUM_PID + 1, gib=None)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([holding(os.getpid()), unseen], []))
    first, second = host_facts().gpus
    assert (first.index, first.total_bytes, first.used_bytes) == (0, 96 * 2**30, 2**30)
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
