"""Who holds a server, and who waits for it: reference counting with a deadline for each. Pure but for the clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aerie.serving.lease import Holder, Waiting
from aerie.serving.plan import Phase

FORGOTTEN_SECONDS = 20.0
"""A waiting client asks every second or so; one that was not heard for this long has died."""


@dataclass
class _Hold:
    since: float  # seconds since 1970, as all that people read
    renewed_at: float
    deadline: float  # of the monotonic clock: a clock that is set does not end a server


class Holds:
    """The owners that hold the server. Tasks of one run are one owner, and the longest of their holds counts."""

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}

    def __bool__(self) -> bool:
        return bool(self._holds)

    def __contains__(self, owner: str) -> bool:
        return owner in self._holds

    def hold(self, owner: str, seconds: float) -> None:
        """Hold for so long from now, or longer where the owner does already."""
        now, deadline = time.time(), time.monotonic() + seconds
        hold = self._holds.setdefault(owner, _Hold(now, now, deadline))
        hold.renewed_at, hold.deadline = now, max(hold.deadline, deadline)

    def release(self, owner: str) -> None:
        """End the owner's hold, if there is one."""
        self._holds.pop(owner, None)

    def clear(self) -> None:
        """End every hold."""
        self._holds.clear()

    def expire(self) -> list[str]:
        """End the holds whose time is over, and name their owners."""
        over = [owner for owner, hold in self._holds.items() if hold.deadline < time.monotonic()]
        for owner in over:
            del self._holds[owner]
        return over

    def listed(self) -> tuple[Holder, ...]:
        """The holders, for the lease."""
        offset = time.time() - time.monotonic()
        return tuple(
            Holder(owner=owner, since=hold.since, renewed_at=hold.renewed_at, expires_at=hold.deadline + offset)
            for owner, hold in self._holds.items()
        )


@dataclass
class _Ticket:
    phase: Phase
    since: float
    heard: float  # of the monotonic clock
    asking: int = 0  # requests that are being answered: their client is not forgotten


class Queue:
    """Owners that wait for the server, first come first served; who no longer asks is forgotten."""

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}

    def __bool__(self) -> bool:
        self._forget_the_dead()
        return bool(self._tickets)

    @contextmanager
    def asking(self, owner: str, phase: Phase) -> Iterator[None]:
        """Have a place in the queue, the old one or the last, while the owner's request is answered."""
        now = time.monotonic()
        ticket = self._tickets.setdefault(owner, _Ticket(phase, time.time(), now))
        ticket.phase, ticket.asking = phase, ticket.asking + 1
        try:
            yield
        finally:
            ticket.asking, ticket.heard = ticket.asking - 1, time.monotonic()

    def leave(self, owner: str) -> None:
        """Give the owner's place up."""
        self._tickets.pop(owner, None)

    def ahead_of(self, owner: str) -> list[str]:
        """Owners whose turn is earlier."""
        self._forget_the_dead()
        waiting = list(self._tickets)
        return waiting[: waiting.index(owner)] if owner in waiting else waiting

    def listed(self) -> tuple[Waiting, ...]:
        """Who waits, in order, for the lease."""
        self._forget_the_dead()
        return tuple(
            Waiting(owner=owner, phase=ticket.phase, since=ticket.since) for owner, ticket in self._tickets.items()
        )

    def _forget_the_dead(self) -> None:
        oldest = time.monotonic() - FORGOTTEN_SECONDS
        self._tickets = {
            owner: ticket for owner, ticket in self._tickets.items() if ticket.asking or ticket.heard > oldest
        }
