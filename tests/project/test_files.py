"""The repository's files: all there, and nothing in them of the machine that they were written on."""

import re

import pytest

from aerie.settings.machine import PROJECT_ROOT

from .conftest import tracked_files

EXPECTED = (
    "aerie", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "docker-compose.yaml",
    "dags/eagle3_pipeline.py", "plugins/aerie_plugin.py", "plugins/.airflowignore", "plugins/aerie_airflow",
    "include/aerie/cli.py", "include/aerie/stages.py", "include/sgl_kernel_cpu",
    "demo/config.yaml", "docker/Dockerfile", "docker/sglang.Dockerfile", "docs/architecture.md",
    "docs/gpu-checklist.md", "benchmarks", "requirements/lock",
    *(f"include/aerie/{room}" for room in (
        "local", "sources", "prompts", "serving", "generation", "boundary", "corpus", "hidden_states", "training",
        "benchmark", "artefacts", "store", "settings",
    )),
)  # fmt: skip

OF_A_MACHINE = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|mnt)/[\w.-]+")
OF_A_REGISTRY = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.(?:org|com)|deb\.debian\.org")


def texts() -> dict[str, str]:
    """Tracked text files by their path in the repository."""
    found = {}
    for path in tracked_files():
        try:
            found[str(path.relative_to(PROJECT_ROOT))] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text file
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_newcomer_is_told_of_is_there(name: str) -> None:
    assert (PROJECT_ROOT / name).exists()


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (PROJECT_ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("pattern", [OF_A_MACHINE, OF_A_REGISTRY], ids=["path of a machine", "host of a registry"])
def test_no_file_works_on_one_machine_only(pattern: re.Pattern[str]) -> None:
    found = {name: match[0] for name, text in texts().items() if (match := pattern.search(text))}
    assert found == {}


def test_no_secret_is_tracked() -> None:
    assert [name for name in texts() if name.startswith("docker/secrets/")] == []
