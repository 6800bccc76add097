"""``docs/boundary.md`` says of every rule what ``rules.py`` says."""

from aerie.boundary.rules import RULES
from aerie.boundary.tables import with_tables
from aerie.boundary.text_dumps import TEXT_DUMP_RULES
from aerie.settings.machine import PROJECT_ROOT

DOCUMENT = PROJECT_ROOT / "docs" / "boundary.md"


def test_every_reason_and_flag_is_documented_as_it_is() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(text, where=str(DOCUMENT)) == text, (
        f"rules changed: run PYTHONPATH=include python -m aerie.boundary.tables {DOCUMENT}"
    )
    for name, rule in {**RULES, **TEXT_DUMP_RULES}.items():
        assert f"| `{name}` | {rule.severity} |" in text
