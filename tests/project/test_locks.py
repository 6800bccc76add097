"""The locks: what they hold, and what they must not."""

import re
from pathlib import Path

import pytest

from aerie.local import environments
from aerie.settings.machine import PROJECT_ROOT

REQUIREMENTS = PROJECT_ROOT / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.txt"))
# What comes with torch comes with the build that the installer chooses.
OF_TORCH = re.compile(r"torch|triton|nvidia-(?!ml-py)\S+|cuda-\S+")


def entries_of(lock: Path) -> dict[str, str]:
    """Requirements of a lock by normalised name, each with its continuation lines."""
    text = lock.read_text(encoding="utf-8").replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {normalised(re.split(r"[=<>!~;\[ @]", entry, maxsplit=1)[0]): entry for entry in entries}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def asked_by(file: Path) -> set[str]:
    """Names that an *.in file asks for, those of the files that it includes among them."""
    names = set()
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            names |= asked_by(file.parent / line.removeprefix("-r ").strip())
        elif line.strip() and not line.startswith("#"):
            names.add(normalised(re.split(r"[=<>!~;\[ ]", line.strip(), maxsplit=1)[0]))
    return names


def test_every_environment_has_its_lock() -> None:
    assert {"airflow.txt", "model.txt", "serve.txt", "tools.txt"} <= {lock.name for lock in LOCKS}
    assert all(environments.locks_of(name) for name in ("airflow", "model", "serve"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_what_a_lock_installs_is_one_version_known_by_its_hash(lock: Path) -> None:
    loose = [
        name
        for name, entry in entries_of(lock).items()
        if not re.match(r"\S+==[^\s*]+", entry) or not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)
    ]
    assert entries_of(lock)
    assert loose == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_no_lock_forces_a_cuda_build_on_a_machine_without_a_gpu(lock: Path) -> None:
    # SGLang imports triton on a CPU too; it is a compiler, not a CUDA library.
    allowed = {"triton"} if lock.name == "serve.txt" else set()
    assert {name for name in entries_of(lock) if OF_TORCH.fullmatch(name)} == allowed


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_is_not_behind_what_is_asked_for(lock: Path) -> None:
    assert asked_by(lock.with_suffix(".in")) - set(entries_of(lock)) - {"torch"} == set()


def test_the_installer_and_the_locks_mean_the_same_torch() -> None:
    for name in environments.WITH_TORCH:
        assert environments.TORCH in (REQUIREMENTS / f"{name}.in").read_text(encoding="utf-8").splitlines()
