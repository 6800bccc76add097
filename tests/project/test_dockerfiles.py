"""The Dockerfiles, as far as they can be checked without a Docker engine."""

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from aerie.settings.machine import PROJECT_ROOT

DOCKERFILES = sorted((PROJECT_ROOT / "docker").glob("*Dockerfile"))
EACH = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    name: str
    value: str


def instructions(dockerfile: Path) -> list[Instruction]:
    """Instructions of a Dockerfile in order."""
    lines = [line for line in dockerfile.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in joined if line.strip()]


def values(dockerfile: Path, name: str) -> list[str]:
    return [found.value for found in instructions(dockerfile) if found.name == name]


def context_has(source: str) -> bool:
    """Whether a file reaches the build: it is there, and .dockerignore lets it through."""
    rules = (PROJECT_ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    let_in = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    return (PROJECT_ROOT / source).exists() and any(fnmatch(source, f"{rule}*") for rule in let_in)


@EACH
def test_a_base_image_is_one_version(dockerfile: Path) -> None:
    stages: set[str] = set()
    for value in values(dockerfile, "FROM"):
        image, _, stage = value.partition(" AS ")
        assert image in stages or re.search(r":v?\d+\.\d+\.\d+", image), value
        stages.add(stage)


@EACH
def test_a_container_does_not_run_as_root(dockerfile: Path) -> None:
    assert values(dockerfile, "USER")[-1] == "50000"


@EACH
def test_packages_come_from_locks_with_hashes_alone(dockerfile: Path) -> None:
    installing = [command for command in values(dockerfile, "RUN") if re.search(r"\b(pip|uv)\b.* install", command)]
    assert all("--require-hashes" in command and "--no-deps" in command for command in installing)


@EACH
def test_no_list_of_packages_is_left_in_a_layer(dockerfile: Path) -> None:
    for command in values(dockerfile, "RUN"):
        assert ("apt-get" in command) == ("rm -rf /var/lib/apt/lists/*" in command), command
        assert "apt-get install" not in command or "--no-install-recommends" in command


@EACH
def test_what_is_copied_is_in_the_build_context(dockerfile: Path) -> None:
    copies = [value.split()[:-1] for value in values(dockerfile, "COPY") if not value.startswith("--from=")]
    assert copies
    assert [source for sources in copies for source in sources if not context_has(source)] == []


@EACH
def test_no_secret_is_in_a_layer(dockerfile: Path) -> None:
    assert not re.search(r"docker/secrets|password|token", dockerfile.read_text(encoding="utf-8"), re.IGNORECASE)


def test_the_image_has_the_server_that_the_code_was_written_for() -> None:
    locked = re.search(r"^sglang==(\S+)", (PROJECT_ROOT / "requirements/serve-no-deps.txt").read_text(), re.MULTILINE)
    assert locked
    bases = values(PROJECT_ROOT / "docker" / "sglang.Dockerfile", "FROM")
    assert f"lmsysorg/sglang:v{locked[1]}" in bases


def test_a_task_finds_the_interpreter_of_each_environment() -> None:
    variables = dict(
        pair.split("=", 1) for value in values(PROJECT_ROOT / "docker" / "Dockerfile", "ENV") for pair in value.split()
    )
    assert variables["AERIE_AIRFLOW_PYTHON"] == "/opt/aerie/envs/airflow/bin/python"
    assert variables["AERIE_MODEL_PYTHON"] == "/opt/aerie/envs/model/bin/python"
    assert variables["AERIE_SERVE_PYTHON"] == "/usr/local/bin/serve-python"
