"""The arithmetic of a server's memory: tokens that fit, host memory of the hierarchical cache.

Sources: SGLang's own sizing (``max_total_num_tokens``) and four measured rows of an 8-GPU deployment of Kimi-K2.5,
which these formulas reproduce to within 0.1 %. GB is 10^9 bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression

from aerie.serving.errors import PlanRefused

HICACHE_SHARE = 0.95
"""Share of the host memory left by the loading model that the hierarchical caches of all ranks may take."""

LOADING_GB_PER_RANK = 5.0
"""Host memory that loading takes where it is not known: the reference deployment's 40 GB over its 8 ranks."""


@dataclass(frozen=True)
class PoolRow:
    """What a server reported: its memory fraction, its ``max_total_num_tokens``, and the bytes per token of its KV."""

    fraction: float
    tokens: int
    bytes_per_token: int


@dataclass(frozen=True)
class PoolLine:
    """``tokens = (pool_bytes * fraction - static_bytes) / bytes_per_token``, for one model on one kind of GPU."""

    pool_bytes: float
    static_bytes: float

    @classmethod
    def through(cls, first: PoolRow, second: PoolRow) -> "PoolLine":
        """The line through two rows.

        Raises:
            PlanRefused: the rows make no line of a server: as ``through_all``.
        """
        return cls.through_all((first, second))

    @classmethod
    def through_all(cls, rows: Sequence[PoolRow]) -> "PoolLine":
        """The line through the rows, by least squares where there are more than two.

        Raises:
            PlanRefused: all rows have the same fraction, or a larger fraction does not hold more.
        """
        fractions = [row.fraction for row in rows]
        if len(set(fractions)) < 2:
            raise PlanRefused(f"rows at mem_fraction_static {fractions[0]} alone give no line: vary the fraction")
        slope, intercept = linear_regression(fractions, [row.tokens * row.bytes_per_token for row in rows])
        if slope <= 0 or intercept >= 0:
            seen = ", ".join(f"{row.fraction:g} = {row.tokens:,} tokens" for row in rows)
            raise PlanRefused(
                f"observations {seen} make no sense together: a larger fraction must hold more tokens, and a server "
                "more than its KV pool; are they of one model on one kind of GPU, each with its KV type?"
            )
        return cls(pool_bytes=slope, static_bytes=-intercept)

    @classmethod
    def calibrated(cls, pool_bytes: float, rows: Sequence[PoolRow]) -> "PoolLine":
        """The line for a known memory through rows of one fraction: what is held before the pool is their mean.

        Raises:
            PlanRefused: the rows hold more than that memory.
        """
        static = fmean(pool_bytes * row.fraction - row.tokens * row.bytes_per_token for row in rows)
        if static < 0:
            raise PlanRefused(
                f"{rows[0].tokens:,} tokens at mem_fraction_static {rows[0].fraction:g} are more than "
                f"{pool_bytes / 2**30:.2f} GiB hold: is the observation of this model on such a GPU?"
            )
        return cls(pool_bytes=pool_bytes, static_bytes=static)

    def tokens(self, fraction: float, bytes_per_token: int) -> int:
        """Tokens that the KV pool holds at a memory fraction."""
        return int((self.pool_bytes * fraction - self.static_bytes) / bytes_per_token)


@dataclass(frozen=True)
class HostMemory:
    """A host's memory for a server: what is available in all, and what of that goes to other things than its caches.

    ``states_gb`` is what the server may hold of the hidden states of unfinished samples, while it generates
    (``hidden_states.capture_memory_gib``); its first rank holds them.
    """

    available_gb: float
    loading_gb: float
    ranks: int
    states_gb: float = 0.0

    @property
    def safe_hicache_gb_per_rank(self) -> int:
        """The largest hierarchical cache per rank, in whole GB, that leaves the host its memory."""
        left_gb = self.available_gb - self.loading_gb - self.states_gb
        return max(0, math.floor(HICACHE_SHARE * left_gb / self.ranks))

    @property
    def safe_hicache_sum(self) -> str:
        """The arithmetic of the largest safe size, as text."""
        states = f" - {self.states_gb:.4g}" if self.states_gb else ""
        return (
            f"floor({HICACHE_SHARE} x ({self.available_gb:g} - {self.loading_gb:g}{states}) / {self.ranks}) = "
            f"{self.safe_hicache_gb_per_rank}"
        )

    def problem(self, hicache_gb_per_rank: int) -> str | None:
        """Why the host cannot hold such a hierarchical cache and the states beside it, with the sum; None where it can.

        SGLang takes the size per rank, and ranks race for the memory.
        """
        states = f" and hidden_states.capture_memory_gib {self.states_gb:.4g} GB" if self.states_gb else ""
        taken = (
            f"the host has {self.available_gb:g} GB available, of which loading takes {self.loading_gb:g} GB{states}"
        )
        if hicache_gb_per_rank > self.safe_hicache_gb_per_rank:
            return (
                f"hicache_size_gb_per_rank {hicache_gb_per_rank}: {self.ranks} ranks x {hicache_gb_per_rank} GB = "
                f"{self.ranks * hicache_gb_per_rank} GB, but {taken}: expected at most {self.safe_hicache_sum}"
            )
        if self.states_gb and self.loading_gb + self.states_gb > self.available_gb:
            return f"{taken}: lower hidden_states.capture_memory_gib, or capture separately"
        return None


def require_host_holds(memory: HostMemory, *, hicache_gb_per_rank: int) -> None:
    """Refuse a server that the host's memory cannot hold.

    Raises:
        PlanRefused: all ranks together ask for more than is safe; the message shows the sum.
    """
    problem = memory.problem(hicache_gb_per_rank)
    if problem:
        raise PlanRefused(problem)
