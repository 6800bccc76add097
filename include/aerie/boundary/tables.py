"""The table of every reason and flag, for ``docs/boundary.md``; the rules themselves are the one place of truth.

    python -m aerie.boundary.tables docs/boundary.md

writes it anew between its marks.
"""

import sys
from pathlib import Path

from aerie.boundary.rules import RULES
from aerie.boundary.text_dumps import TEXT_DUMP_RULES
from aerie.documents import with_table

TABLES = {"rules": RULES, "text rules": TEXT_DUMP_RULES}


def with_tables(document: str, *, where: str) -> str:
    """``document`` with what stands between the marks of each table written anew.

    Raises:
        BadInput: a table's marks are missing.
    """
    for name, rules in TABLES.items():
        rows = ((f"`{rule.name}`", rule.severity, rule.rationale, rule.source) for rule in rules.values())
        document = with_table(document, name, ("name", "severity", "why", "source"), rows, where=where)
    return document


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8"), where=str(path)), encoding="utf-8")
