"""What a person sees of a stage that runs: a bar in a terminal, lines with the time in a log."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

Event = Mapping[str, Any]
OF = "of_"
GENERATION_PAIRS = (("response_tokens", "budget_tokens"), ("done", "prompts"))
"""Figures of ``generate`` that tell how far it is: of the budget where there is one, else of the prompts."""


def share_done(event: Event) -> tuple[float, float] | None:
    """How far a stage is, from a progress event's figures: so many of so many; None where they do not tell.

    A figure that has a whole is named ``of_`` and its name, such as ``rows`` and ``of_rows``.
    """
    pairs = [(name, f"{OF}{name}") for name in event if f"{OF}{name}" in event]
    for part, whole in (*pairs, *GENERATION_PAIRS):
        if event.get(part) is not None and event.get(whole):
            return event[part], event[whole]
    return None


@contextmanager
def shown(title: str, console: Console) -> Iterator[Callable[[Event], None]]:
    """Show a stage's events for the duration of the block; yields what is to be told of each.

    Args:
        title: of the bar, or at the beginning of each line.
        console: where; a terminal gets a bar, anything else one line an event.
    """
    if not console.is_terminal:
        yield partial(_log, console, title)
        return
    said = TextColumn("{task.fields[said]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    columns = ("{task.description}", BarColumn(20), "{task.percentage:>3.0f}%", TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), said, console=console, transient=True, expand=True) as progress:
        yield partial(_draw, progress, progress.add_task(title, total=None, said=""))


def _log(console: Console, title: str, event: Event) -> None:
    if (message := _message(event)) is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        _print(console, f"{at} {title}: {message}")


def _draw(progress: Progress, bar: TaskID, event: Event) -> None:
    """Move the bar by an event that tells how far the stage is; print any other above it."""
    message = _message(event)
    if message is None:
        return
    share = share_done(event)
    if share is None:
        _print(progress.console, message)
    else:
        done, whole = share
        progress.update(bar, completed=min(done, whole), total=whole, said=message.replace("[", r"\["))


def _print(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _message(event: Event) -> str | None:
    """An event as a line for people, None for what is not for them."""
    if event["type"] == "progress":
        return str(event["message"])
    return f"ALERT {event['reason']}: {event['message']}" if event["type"] == "alert" else None
