"""A server that lives and makes no tokens: how that is noticed, and told from one that is slow or idle."""

import re
import time
from collections.abc import Callable

from aerie.errors import Retryable
from aerie.generation.client import GenerateClient, Refused, ServerGone
from aerie.stages import Events

# Tokens of decoding steps and of every chunk of a prefill, counted as they are computed: a long prefill moves it too.
_COMPUTED = re.compile(rb"^sglang:realtime_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
METRICS = "/metrics"


class Stalled(Retryable):
    """The server has requests and makes no tokens."""


class Stuck(Retryable):
    """The server stalled, and was ended; the message says what was found out before that, and names the file."""


class StallWatch:
    """Looks at the server's count of computed tokens. ``in_flight`` says how many requests wait for their answer."""

    def __init__(
        self,
        client: GenerateClient,
        *,
        in_flight: Callable[[], int],
        stall_seconds: float,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._in_flight = in_flight
        self._stall_seconds = stall_seconds
        self._events = events
        self._clock = clock
        self._tokens: float | None = None
        self._moved_at = clock()
        self._alerted = False

    @property
    def period_seconds(self) -> float:
        """How often to look."""
        return min(self._stall_seconds / 4, 5.0)

    async def look(self) -> None:
        """Look once.

        Raises:
            Stalled: no token was computed for ``stall_seconds``, while requests were in flight all the time.
        """
        tokens = await self._computed_tokens()
        now, in_flight = self._clock(), self._in_flight()
        if tokens is None:
            return
        if tokens != self._tokens or not in_flight:
            self._tokens, self._moved_at = tokens, now
        elif now - self._moved_at >= self._stall_seconds:
            raise Stalled(
                f"the server computed no token for {now - self._moved_at:.0f} s with {in_flight} requests in flight: "
                f"{tokens:,.0f} tokens since it was started, then none (serving.stall_seconds is "
                f"{self._stall_seconds:g})"
            )

    async def _computed_tokens(self) -> float | None:
        """Tokens that the server has computed; None where it does not say so.

        Whether it answers at all is the client's and the keeper's business, who have their own patience.
        """
        try:
            counts = _COMPUTED.findall(await self._client.read(METRICS))
        except Refused as error:
            self._alert(str(error))
            return None
        except ServerGone:
            return None
        if not counts:
            self._alert(f"{METRICS} has no sglang:realtime_tokens_total")
            return None
        return sum(map(float, counts))

    def _alert(self, why: str) -> None:
        if not self._alerted:
            self._events.alert("stall_unwatched", f"a server that is stuck will not be noticed by its tokens: {why}")
        self._alerted = True
