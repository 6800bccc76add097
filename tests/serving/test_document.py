"""``docs/serving.md`` says of every known failure what ``failures.py`` says."""

from aerie.serving.failures import KNOWN
from aerie.serving.failures_table import with_failures
from aerie.settings.machine import PROJECT_ROOT

DOCUMENT = PROJECT_ROOT / "docs" / "serving.md"


def test_every_known_failure_is_documented_as_it_is() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_failures(text, where=str(DOCUMENT)) == text, (
        f"failures changed: run PYTHONPATH=include python -m aerie.serving.failures_table {DOCUMENT}"
    )
    for known in KNOWN:
        assert known.advice.replace("|", "\\|") in text
