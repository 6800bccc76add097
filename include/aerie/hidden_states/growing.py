"""States of requests that are still being generated, assembled row by row in bounded memory.

How long a request gets is known only when it has ended, and whether it is kept only to the client, who then asks for
it (``protocol.GeneratedRequest``). What is never asked for (quarantined, aborted, of a client that was killed) is
dropped when its memory is wanted: the request that got no row for longest goes first, so running ones go last.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aerie.errors import Failed

BLOCK_ROWS = 64
ROW_OVERHEAD_BYTES = 9  # a token id, and whether the row is there

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class Block:
    """Up to ``BLOCK_ROWS`` consecutive rows."""

    def __init__(self, row_bytes: int) -> None:
        self.token_ids = np.zeros(BLOCK_ROWS, dtype=np.int64)
        self.rows = np.empty((BLOCK_ROWS, row_bytes), dtype=np.uint8)
        self.seen = np.zeros(BLOCK_ROWS, dtype=np.bool_)


@dataclass(frozen=True)
class GrownRows:
    """A whole request: token ids [S], and the bytes of each token's states [S, row bytes]."""

    token_ids: Int64Array
    rows: ByteArray


class Growing:
    """Requests by key, in at most ``memory_bytes``."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._held_bytes = 0
        self._open: OrderedDict[str, list[Block]] = OrderedDict()
        self._dropped = 0

    @property
    def held_bytes(self) -> int:
        """Memory that the rows take now."""
        return self._held_bytes

    def add(self, key: str, position: int, token_ids: Int64Array, rows: ByteArray) -> None:
        """Put rows from ``position`` on in their place, over rows that are there (a retracted request's).

        Only a first row opens a request: one that was dropped, or whose beginning came from a cache, stays out.
        """
        if key not in self._open:
            if position != 0:
                return
            self._open[key] = []
        self._open.move_to_end(key)
        blocks, done = self._open[key], 0
        while done < len(token_ids):
            number, offset = divmod(position + done, BLOCK_ROWS)
            while len(blocks) <= number:
                if not self._make_room(rows.shape[1]):
                    return
                blocks.append(Block(rows.shape[1]))
            taken = min(BLOCK_ROWS - offset, len(token_ids) - done)
            here, there = slice(offset, offset + taken), slice(done, done + taken)
            block = blocks[number]
            block.token_ids[here], block.rows[here], block.seen[here] = token_ids[there], rows[there], True
            done += taken

    def take(self, key: str, tokens: int) -> GrownRows:
        """The first ``tokens`` rows of a request, which is forgotten.

        Raises:
            Failed: a row is not there.
        """
        blocks = self._open.get(key, [])
        self._forget(key)
        seen = np.concatenate([block.seen for block in blocks])[:tokens] if blocks else np.zeros(0, dtype=np.bool_)
        if len(seen) < tokens or not seen.all():
            raise Failed(
                f"{int(seen.sum())} of its {tokens} rows are there: the others came from a cache or another replica, "
                f"or were dropped for want of memory ({self._dropped} requests were, at "
                f"{self._memory_bytes / 2**30:.3g} GiB: hidden_states.capture_memory_gib)"
            )
        return GrownRows(
            token_ids=np.concatenate([block.token_ids for block in blocks])[:tokens],
            rows=np.concatenate([block.rows for block in blocks])[:tokens],
        )

    def _make_room(self, row_bytes: int) -> bool:
        """Reserve a block, dropping what got no row for longest; False where even the latest had to go."""
        wanted = BLOCK_ROWS * (row_bytes + ROW_OVERHEAD_BYTES)
        while self._held_bytes + wanted > self._memory_bytes:
            oldest = next(iter(self._open))
            latest = oldest == next(reversed(self._open))
            self._forget(oldest)
            self._dropped += 1
            if latest:
                return False
        self._held_bytes += wanted
        return True

    def _forget(self, key: str) -> None:
        blocks = self._open.pop(key, [])
        self._held_bytes -= sum(BLOCK_ROWS * (block.rows.shape[1] + ROW_OVERHEAD_BYTES) for block in blocks)
