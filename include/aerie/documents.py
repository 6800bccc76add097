"""Tables in documents that are written from the code, which is the one place of truth."""

from collections.abc import Iterable, Sequence

from aerie.errors import BadInput


def with_table(document: str, name: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, where: str) -> str:
    """``document`` with what stands between the marks of a table written anew.

    Raises:
        BadInput: the table's marks are missing.
    """
    before, begin, rest = document.partition(f"<!-- {name}: begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}: end -->\n")
    if not begin or not end:
        raise BadInput(f"{where}: expected the lines '<!-- {name}: begin -->' and '<!-- {name}: end -->'")
    lines = [_line(heads), f"|{'---|' * len(heads)}\n", *map(_line, rows)]
    return f"{before}{begin}{''.join(lines)}{end}{after}"


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |\n"
