"""The table of known failures, for ``docs/serving.md``; ``failures.py`` is the one place of truth.

    python -m aerie.serving.failures_table docs/serving.md

writes it anew between its marks.
"""

import sys
from pathlib import Path

from aerie.documents import with_table
from aerie.serving.failures import KNOWN


def with_failures(document: str, *, where: str) -> str:
    """``document`` with its table of known failures written anew.

    Raises:
        BadInput: the table's marks are missing.
    """
    rows = (("; ".join(f"`{text}`" for text in known.says.split("; ")), known.advice) for known in KNOWN)
    return with_table(document, "failures", ("the log says", "what it means, and what to do"), rows, where=where)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_failures(path.read_text(encoding="utf-8"), where=str(path)), encoding="utf-8")
