"""The table of every reason and flag, for ``docs/boundary.md``; the rules themselves are the one place of truth.

    python -m aerie.boundary.tables docs/boundary.md

writes it anew between its marks.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from aerie.boundary.rules import RULES, Rule
from aerie.boundary.text_dumps import TEXT_DUMP_RULES
from aerie.errors import BadInput

TABLES = {"rules": RULES, "text rules": TEXT_DUMP_RULES}


def with_tables(document: str, *, where: str) -> str:
    """``document`` with what stands between the marks of each table written anew.

    Raises:
        BadInput: a table's marks are missing.
    """
    for name, rules in TABLES.items():
        before, begin, rest = document.partition(f"<!-- {name}: begin -->\n")
        _, end, after = rest.partition(f"<!-- {name}: end -->\n")
        if not begin or not end:
            raise BadInput(f"{where}: expected the lines '<!-- {name}: begin -->' and '<!-- {name}: end -->'")
        document = f"{before}{begin}{''.join(_lines(rules.values()))}{end}{after}"
    return document


def _lines(rules: Iterable[Rule]) -> Iterator[str]:
    yield "| name | severity | why | source |\n"
    yield "|---|---|---|---|\n"
    for rule in rules:
        yield f"| `{rule.name}` | {rule.severity} | {_cell(rule.rationale)} | {_cell(rule.source)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8"), where=str(path)), encoding="utf-8")
