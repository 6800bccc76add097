"""Rows as mappings."""

from collections.abc import Iterator
from typing import Any

from aerie.store.connection import Cursor

Row = dict[str, Any]


def as_mappings(cursor: Cursor) -> Iterator[Row]:
    """The rows of the last query, each as a mapping from column name to value."""
    names = [column.name for column in cursor.description or ()]
    for row in cursor:
        yield dict(zip(names, row, strict=True))
