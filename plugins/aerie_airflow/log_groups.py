"""Long blocks in a task's log, which Airflow's UI folds; what people follow stays outside of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Log(Protocol):
    """What writes one line of a task's log."""

    def info(self, text: str, /, *values: object) -> None:
        """Write a line."""


class GroupedLog:
    """Writes lines; those that follow each other with the same group's name are folded together."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._group: str | None = None

    def line(self, text: str, *, group: str | None = None) -> None:
        """Write a line, in a group or outside."""
        if group != self._group:
            self.close()
            if group is not None:
                self._log.info("%s", f"::group::{group}")
            self._group = group
        self._log.info("%s", text)

    def block(self, group: str, lines: Iterable[str]) -> None:
        """Write a whole group."""
        for text in lines:
            self.line(text, group=group)
        self.close()

    def close(self) -> None:
        """End the group that is open, if one is."""
        if self._group is not None:
            self._log.info("::endgroup::")
            self._group = None
