"""Where a merge is, told every few seconds however fast the rows come."""

import time

from aerie.stages import Events


class Progress:
    """Progress events of a pass over rows, one every ``every`` seconds."""

    def __init__(self, events: Events, every: float) -> None:
        self._events = events
        self._every = every
        self._reported = time.monotonic()

    def told(self, what: str, rows: int, of_rows: int) -> None:
        """Report that ``rows`` of ``of_rows`` are ``what``, if the last report is so long ago."""
        now = time.monotonic()
        if now - self._reported >= self._every:
            self._reported = now
            self._events.progress(f"{what} {rows} of {of_rows} rows", rows=rows, of_rows=of_rows)
