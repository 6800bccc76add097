"""Arrows go down: the pipeline knows no Airflow, and a lower floor knows nothing of a higher one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from aerie.settings.machine import PROJECT_ROOT

AERIE = PROJECT_ROOT / "include" / "aerie"
FLOORS = (
    {
        "errors", "ports", "processes", "documents", "masking", "alerting", "artefacts", "store", "settings", "sources",
        "stages",
    },
    {"boundary", "serving", "corpus", "prompts"},
    {"generation", "hidden_states", "benchmark"},
    {"training"},
)  # fmt: skip
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TOP = len(FLOORS)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def floor_of(module: str) -> int:
    parts = module.split(".")
    return FLOOR_OF.get(parts[1], TOP) if len(parts) > 1 else 0


def modules() -> list[Path]:
    return sorted(AERIE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(AERIE)))
def test_no_arrow_goes_up(path: Path) -> None:
    here = floor_of(".".join(("aerie", *path.relative_to(AERIE).with_suffix("").parts)))
    names = list(imports_of(path))
    assert [name for name in names if name.split(".")[0] == "airflow"] == []
    assert [name for name in names if name.split(".")[0] == "aerie" and floor_of(name) > here] == []
