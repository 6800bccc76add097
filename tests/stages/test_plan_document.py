"""``docs/serving.md`` has the reference deployment's rows beside what the planner says of them now."""

from pathlib import Path

import pytest

from aerie.plan_tables import with_tables
from aerie.settings.machine import PROJECT_ROOT

DOCUMENT = PROJECT_ROOT / "docs" / "serving.md"


def test_the_reference_deployments_rows_are_documented_as_the_planner_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AERIE_MODELS", str(tmp_path))
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(text, where=str(DOCUMENT)) == text, (
        f"the planner changed: run PYTHONPATH=include python -m aerie.plan_tables {DOCUMENT}"
    )
