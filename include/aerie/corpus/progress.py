"""Where a merge is, told every few seconds however fast the rows come."""

from aerie.stages import Cadence, Events


class Progress:
    """Progress events of a pass over rows, one every ``every`` seconds."""

    def __init__(self, events: Events, every: float) -> None:
        self._events = events
        self._cadence = Cadence(every)

    def told(self, what: str, rows: int, of_rows: int) -> None:
        """Report that ``rows`` of ``of_rows`` are ``what``, if the last report is so long ago."""
        if self._cadence.is_due():
            self._events.progress(f"{what} {rows} of {of_rows} rows", rows=rows, of_rows=of_rows)
