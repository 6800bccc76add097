"""The reader of data sets that Aerie does not know: columns of the field's usual names, or as the settings map them."""

import json
from collections.abc import Mapping
from typing import Any

from aerie.settings.pipeline import ColumnSettings
from aerie.sources.chat import declarations, standard_messages
from aerie.sources.conversation import Conversation, Message, Unusable, well_formed

MESSAGE_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = (("prompt",), ("instruction", "input"))


class GenericReader:
    """Reads rows by a mapping of columns (``ColumnSettings``)."""

    def __init__(self, columns: ColumnSettings) -> None:
        self._columns = columns

    def __call__(self, row: Mapping[str, Any]) -> Conversation:
        """Read one row; a ``prompt`` column that holds a list of turns is read as ``messages``.

        Raises:
            Unusable: a column is missing or holds something else, a role is unknown, or nothing is left.
        """
        columns = self._columns
        tools = declarations(_optional(row, columns.tools, "tools"))
        messages = [*self._system(row), *self._messages(row, {tool["function"]["name"] for tool in tools})]
        kept, notes = well_formed(messages)
        source_id = _identity(_optional(row, columns.id, "id"))
        conversation_id = _identity(_column(row, columns.conversation_id)) if columns.conversation_id else None
        return Conversation(source_id, conversation_id, kept, tools, notes)

    def _system(self, row: Mapping[str, Any]) -> list[Message]:
        if self._columns.system is None:
            return []
        text = _text(row, self._columns.system)
        return [{"role": "system", "content": text}] if text else []

    def _messages(self, row: Mapping[str, Any], declared: set[str]) -> list[Message]:
        columns = self._columns
        names = self._names(row)
        value = _column(row, names[0])
        if isinstance(value, list):
            return standard_messages(value, declared, role=columns.role, content=columns.content, roles=columns.roles)
        if names[0] == columns.messages or names[0] in MESSAGE_COLUMNS:
            raise Unusable("missing_field", f"expected a list of turns in {names[0]!r}, found {type(value).__name__}")
        return [{"role": "user", "content": "\n\n".join(filter(None, (_text(row, name) for name in names)))}]

    def _names(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Columns that hold the conversation."""
        columns = self._columns
        if columns.messages is not None:
            return (columns.messages,)
        if columns.prompt is not None:
            return (columns.prompt,) if isinstance(columns.prompt, str) else columns.prompt
        for name in MESSAGE_COLUMNS:
            if name in row:
                return (name,)
        for names in PROMPT_COLUMNS:
            if names[0] in row:
                return tuple(name for name in names if name in row)
        raise Unusable(
            "missing_field",
            f"expected a column {', '.join((*MESSAGE_COLUMNS, *(names[0] for names in PROMPT_COLUMNS)))}, or "
            f"'columns' in the settings; the row has {', '.join(row)}",
        )


def _column(row: Mapping[str, Any], name: str) -> Any:
    """Value of column ``name``; lists that are stored as JSON text are decoded."""
    if name not in row:
        raise Unusable("missing_field", f"no column {name!r}; the row has {', '.join(row)}")
    value = row[name]
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            decoded = json.loads(value, strict=False)
        except ValueError:
            return value  # a text that begins with a bracket
        return decoded if all(isinstance(item, Mapping) for item in decoded) else value
    return value


def _optional(row: Mapping[str, Any], named: str | None, usual: str) -> Any:
    """Value of the column that is named; of the usual one, if the row has it, where none is."""
    return _column(row, named) if named is not None else _column(row, usual) if usual in row else None


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if name not in row or not isinstance(value, str | None):
        raise Unusable("missing_field", f"expected text in {name!r}, found {type(value).__name__}")
    return (value or "").strip()


def _identity(value: object) -> str | None:
    return str(value).strip() or None if isinstance(value, str | int) else None
