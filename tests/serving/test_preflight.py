"""What stands in a server's way is found before it is started; for real, but for NVML."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from aerie.errors import BadInput
from aerie.serving.errors import MachineNotReady, PlanRefused
from aerie.serving.leftovers import marks
from aerie.serving.plan import DrafterPlan, ServerPlan
from aerie.serving.preflight import PreflightOptions, preflight

from .conftest import TINY_VERIFIER
from .fake_nvml import MAXIMUM_PID, FakeNvml, holding

Make = Callable[..., ServerPlan]


def check(plan: ServerPlan, folder: Path, **options: object) -> list[str]:
    return preflight(plan, PreflightOptions.model_validate(options), folder=folder)


@pytest.fixture
def gpu_plan(make_plan: Make) -> Make:
    """A plan of the demo's verifier on a GPU, but for what is changed."""

    def make(**changes: object) -> ServerPlan:
        return make_plan(**{"model_path": TINY_VERIFIER, **changes})

    return make


# The plan, on the GPUs that are there


def test_what_the_gpus_cannot_hold_is_refused_with_the_sums(
    gpu_plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]))
    with pytest.raises(PlanRefused, match=r"generate server cannot be launched here: 2 GPUs are needed, 1 are there"):
        check(gpu_plan(data_parallel_size=2), tmp_path)
    with pytest.raises(PlanRefused, match=r"graphs and buffers do not fit: 94\.45 x \(1 - 0\.99\)"):
        check(gpu_plan(mem_fraction_static=0.99), tmp_path)


# The disk, the port, the files


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: a disk that is really full. It takes root to mount one: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_full_disk_is_found_before_the_log_is_cut(gpu_plan: Make, small_disk: Path) -> None:
    with pytest.raises(MachineNotReady, match=rf"{small_disk}: 0\.00 GB are free on its disk.*make room"):
        check(gpu_plan(), small_disk)


def test_taken_port_is_refused(gpu_plan: Make, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MachineNotReady, match=rf"127\.0\.0\.1:{port} is taken.*serving\.port"):
            check(gpu_plan(port=port), tmp_path)
    check(gpu_plan(port=port), tmp_path)


def test_cut_shard_is_refused_and_named(gpu_plan: Make, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(gpu_plan().model_path, cut)
    shard = cut / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(BadInput, match=rf"not whole: {shard}: .*cut.*\./aerie fetch-model"):
        check(gpu_plan(model_path=cut), tmp_path)


def test_wrong_path_is_refused(gpu_plan: Make, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"/models/nowhere: there is no such folder.*Correct verifier\.path"):
        check(gpu_plan(model_path=Path("/models/nowhere")), tmp_path)


def test_drafter_that_is_not_whole_is_refused(gpu_plan: Make, tmp_path: Path) -> None:
    drafter = DrafterPlan(path=tmp_path, identity="drafter-1")
    with pytest.raises(BadInput, match=rf"the drafter is not whole: {tmp_path}/config\.json: missing"):
        check(gpu_plan(phase="benchmark", drafter=drafter), tmp_path)


# The host's memory


def test_hierarchical_cache_beyond_this_host_is_refused_with_the_sum(gpu_plan: Make, tmp_path: Path) -> None:
    available_gb = psutil.virtual_memory().available / 1e9
    plan = gpu_plan(hicache_size_gb_per_rank=int(available_gb), tensor_parallel_size=8)
    with pytest.raises(PlanRefused, match=rf"8 ranks x {int(available_gb)} GB = {8 * int(available_gb)} GB, but the"):
        check(plan, tmp_path)


def test_hierarchical_cache_that_fits_is_let_through(gpu_plan: Make, tmp_path: Path) -> None:
    plan = gpu_plan(hicache_size_gb_per_rank=1)
    check(plan, tmp_path, host_loading_gb=0.1)
    with pytest.raises(PlanRefused, match="of which loading takes 5 GB"):
        check(plan, tmp_path, host_ram_gb=5.5)
    check(plan.model_copy(update={"phase": "capture"}), tmp_path, host_ram_gb=5.5)  # has no such cache


def test_states_that_do_not_fit_beside_the_hierarchical_cache_are_refused(gpu_plan: Make, tmp_path: Path) -> None:
    hook = {"name": "capture", "target_modules": ["model.norm"], "hook_factory": "somewhere:factory"}
    hooks = ({**hook, "config": {"generated_bytes": 10**9}}, {**hook, "config": {"generated_bytes": 10**9}})
    host = {"host_loading_gb": 0.1, "host_ram_gb": 1.5}
    check(gpu_plan(hicache_size_gb_per_rank=1), tmp_path, **host)
    check(gpu_plan(forward_hooks=hooks), tmp_path, **host)  # which share their memory
    with pytest.raises(
        PlanRefused, match=r"1\.5 GB available, .* and hidden_states\.capture_memory_gib 1 GB: expected"
    ):
        check(gpu_plan(hicache_size_gb_per_rank=1, forward_hooks=hooks), tmp_path, **host)


def test_host_without_the_memory_for_loading_is_refused(gpu_plan: Make, tmp_path: Path) -> None:
    with pytest.raises(MachineNotReady, match=r"loading takes 4\.0 GB of this host's memory, 3\.0 GB are available"):
        check(gpu_plan(), tmp_path, host_loading_gb=4, host_ram_gb=3)


# The GPUs


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts processes that stand for some on the GPUs; those that are ours have a server's mark."""
    started: list[subprocess.Popen[bytes]] = []

    def call(*, ours: bool) -> int:
        environment = {**os.environ, **(marks(tmp_path) if ours else {})}
        command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1].pid

    yield call
    for process in started:
        process.kill()
        process.communicate()


def test_machine_without_a_gpu_says_what_was_not_checked(gpu_plan: Make, tmp_path: Path) -> None:
    assert check(gpu_plan(), tmp_path) == ["this machine has no GPU: what holds the GPUs was not checked"]


def test_free_gpus_are_said_to_be_free(
    monkeypatch: pytest.MonkeyPatch, gpu_plan: Make, fake_plan: Make, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], []))
    assert check(gpu_plan(data_parallel_size=2), tmp_path) == ["nothing holds GPU 0, 1"]
    assert check(fake_plan(), tmp_path) == ["the server takes no GPU: what holds the GPUs was not checked"]


def test_whoever_holds_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, gpu_plan: Make, tmp_path: Path, start: Callable[..., int]
) -> None:
    pid = start(ours=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], [holding(pid, 83.5), holding(MAXIMUM_PID + 1, None)]))
    process = psutil.Process(pid)
    with pytest.raises(MachineNotReady) as refusal:
        check(gpu_plan(data_parallel_size=2), tmp_path)
    assert f"pid {pid} ({process.name()}, of {process.username()}) 83.5 GiB of GPU 1" in str(refusal.value)
    assert f"pid {MAXIMUM_PID + 1} (name not known, of an unknown owner) GPU 1" in str(refusal.value)
    assert "./aerie server reap" in str(refusal.value)


def test_gpus_that_the_server_does_not_take_are_nobodys_business(
    monkeypatch: pytest.MonkeyPatch, gpu_plan: Make, tmp_path: Path, start: Callable[..., int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], [holding(start(ours=False))]))
    assert check(gpu_plan(), tmp_path) == ["nothing holds GPU 0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(MachineNotReady, match="of GPU 1"):
        check(gpu_plan(), tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(MachineNotReady, match="of GPU 1"):
        check(gpu_plan(), tmp_path)


def test_memory_that_nobody_visible_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpu_plan: Make, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], used_bytes=80 * 2**30))
    with pytest.raises(MachineNotReady, match=r"cannot be seen from here.*80\.0 GiB of GPU 0"):
        check(gpu_plan(), tmp_path)


def test_leftovers_of_ours_are_ended_when_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, gpu_plan: Make, tmp_path: Path, start: Callable[..., int]
) -> None:
    pid = start(ours=True)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([holding(pid, 73.9)]))
    with pytest.raises(MachineNotReady, match=f"pid {pid} "):
        check(gpu_plan(), tmp_path)
    ended, free = check(gpu_plan(), tmp_path, reap_leftovers=True)
    assert f"pid {pid} " in ended
    assert "73.9 GiB of GPU 0" in ended
    assert free == "nothing holds GPU 0"
    assert not psutil.pid_exists(pid)


def test_processes_of_others_are_never_ended(
    monkeypatch: pytest.MonkeyPatch, gpu_plan: Make, tmp_path: Path, start: Callable[..., int]
) -> None:
    ours, theirs = start(ours=True), start(ours=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([holding(ours), holding(theirs)]))
    with pytest.raises(MachineNotReady, match=f"pid {theirs} ") as refusal:
        check(gpu_plan(), tmp_path, reap_leftovers=True)
    assert f"pid {ours} " not in str(refusal.value)
    assert psutil.Process(theirs).status() != psutil.STATUS_ZOMBIE
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(MachineNotReady):
        check(gpu_plan(), other, reap_leftovers=True)  # marked by a server of another folder
