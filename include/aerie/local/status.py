"""What a terminal shows of the stack and of what is being generated."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aerie.errors import Retryable
from aerie.generation.reporting import progress_line
from aerie.local.configuration import StackConfiguration
from aerie.local.stack import status
from aerie.store.connection import connected
from aerie.store.queries.ledger import list_writers

REFRESH_SECONDS = 2.0


def show() -> None:
    """Print it once."""
    console = Console(soft_wrap=True, highlight=False)
    for line in lines():
        console.print(line)


def watch_over() -> None:
    """Keep showing it until interrupted."""
    with Live(Text(), refresh_per_second=4) as live:
        try:
            while True:
                live.update(Text("\n".join(lines())))
                time.sleep(REFRESH_SECONDS)
        except KeyboardInterrupt:
            return


def lines() -> Iterator[str]:
    """One line for each part of the stack, and one for each data set that is being generated."""
    parts = status()
    for part, state in parts.items():
        yield f"{part:24} {state}"
    if parts.get("PostgreSQL", "stopped") != "stopped":
        yield from generation_lines(StackConfiguration.load_or_make().database_url)


def generation_lines(database_url: str) -> Iterator[str]:
    """The latest progress line of each data set that is being generated."""
    try:
        with connected(database_url, application="aerie status") as connection:
            writers = list_writers(connection)
    except Retryable as error:
        yield f"generation               not known: {error}"
        return
    for writer in writers:
        progress = progress_line(writer["figures"]) if writer["figures"] else "no progress yet"
        yield f"{writer['edition']}/{writer['dataset']}: {progress}"
