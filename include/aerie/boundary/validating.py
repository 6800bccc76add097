"""What ``./aerie validate`` does: judge files one after the other, print verdicts or a summary, and say how it went."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from aerie.boundary.files import FileJudge, FileVerdict
from aerie.boundary.rules import RULES
from aerie.boundary.text_dumps import TEXT_DUMP_RULES
from aerie.errors import BadInput

ALL_KEPT, SOME_NOT_KEPT, UNREADABLE = 0, 1, 2
"""Exit codes; the highest of all files counts."""

EXAMPLES = 5
PROBLEMS_SAID = 20
"""Rows of a file whose problem is told one by one; the rest are counted."""


@dataclass
class FileSummary:
    """Counts of one file; ``examples`` are the first rows of each reason and flag."""

    file: str
    rows: int = 0
    kept: int = 0
    unreadable: int = 0
    damaged: bool = False
    names: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[int]] = field(default_factory=dict)

    def add(self, verdict: FileVerdict) -> None:
        """Count one verdict."""
        self.rows += 1
        self.kept += verdict.kept
        self.unchecked.update(verdict.unchecked)
        for name in (*verdict.reasons, *verdict.flags):
            self.names[name] += 1
            rows = self.examples.setdefault(name, [])
            if len(rows) < EXAMPLES:
                rows.append(verdict.row)

    @property
    def exit_code(self) -> int:
        """What this file alone would end with."""
        if self.damaged or self.unreadable:
            return UNREADABLE
        return ALL_KEPT if self.kept == self.rows else SOME_NOT_KEPT


def validate_files(paths: Sequence[Path], judge: FileJudge, *, as_json: bool, say: Callable[[str], None]) -> int:
    """Judge files in the order given; returns the exit code.

    Verdicts, or a summary of each file, go to the standard output; ``say`` is told what cannot be read. Neither a row
    nor a file that cannot be read ends the work.
    """
    exit_code = ALL_KEPT
    for path in paths:
        summary = FileSummary(str(path))
        for verdict in _verdicts(path, judge, summary, say):
            summary.add(verdict)
            if as_json:
                sys.stdout.write(verdict.as_json() + "\n")
        if summary.unreadable > PROBLEMS_SAID:
            say(f"{path}: {summary.unreadable - PROBLEMS_SAID:,} more rows cannot be read")
        if not as_json and (summary.rows or summary.unreadable):
            _print(summary)
        exit_code = max(exit_code, summary.exit_code)
    sys.stdout.flush()
    return exit_code


def _verdicts(path: Path, judge: FileJudge, summary: FileSummary, say: Callable[[str], None]) -> Iterator[FileVerdict]:
    try:
        for found in judge.judge(path):
            if isinstance(found, FileVerdict):
                yield found
                continue
            summary.unreadable += 1
            if summary.unreadable <= PROBLEMS_SAID:
                say(found.problem)
    except BadInput as error:
        summary.damaged = True
        say(str(error))


def _print(summary: FileSummary) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    damaged = ", and the file cannot be read to its end" if summary.damaged else ""
    console.print(
        f"{_printable(summary.file)}: {summary.rows:,} rows judged, {summary.kept:,} kept, "
        f"{summary.rows - summary.kept:,} quarantined, {summary.unreadable:,} unreadable{damaged}"
    )
    if summary.names:
        console.print(_table(summary))
    by_rows = sorted(summary.unchecked, key=lambda name: -summary.unchecked[name])
    for rows, names in groupby(by_rows, key=lambda name: summary.unchecked[name]):
        console.print(f"  not checked in {'all' if rows == summary.rows else f'{rows:,}'} rows: {', '.join(names)}")


def _table(summary: FileSummary) -> Table:
    table = Table("reason or flag", "severity", box=box.SIMPLE, pad_edge=False)
    for heading in ("rows", "share"):
        table.add_column(heading, justify="right")
    table.add_column("first rows")
    rules = {**RULES, **TEXT_DUMP_RULES}
    for name in sorted(summary.names, key=lambda name: (rules[name].severity, -summary.names[name], name)):
        rows = summary.names[name]
        examples = ", ".join(map(str, summary.examples[name]))
        table.add_row(name, rules[name].severity, f"{rows:,}", f"{rows / summary.rows:.1%}", examples)
    return table


def _printable(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
