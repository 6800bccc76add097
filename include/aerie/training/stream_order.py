"""The order in which speculators' trainer asks for corpus rows: by its own packing, from any step of any epoch on.

Each epoch begins with the training batches, step by step and rank by rank, in an order drawn from seed and epoch; then
come the validation batches, in an order drawn from the epoch alone (``create_train_val_loaders``). Every row is asked
for once an epoch. Data loader workers read ahead, each a batch of its own, but finish no batch before its rows are
there: what is first in this order and not yet read is always being waited for, or will be without anything behind it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from aerie.errors import Failed
from aerie.training.checkpoints import BatchPlan, Progress

VALIDATION_SEED = 0


@dataclass(frozen=True)
class Use:
    """One time that the trainer asks for corpus row ``row``."""

    epoch: int
    row: int


@dataclass(frozen=True)
class StreamOrder:
    """Batches of a training; the rows of ``validation`` come behind those of ``train`` in the corpus."""

    train: BatchPlan
    validation: BatchPlan
    epochs: int

    def uses(self, after: Progress | None) -> Iterator[Use]:
        """Yield what a trainer asks for that resumes after the checkpoint at ``after``; None: it begins."""
        first, made = (0, 0) if after is None else (after.epoch, after.local_step)
        if after is not None and made == 0:  # that epoch is finished, and is not validated again
            first += 1
        for epoch in range(first, self.epochs):
            yield from (Use(epoch, row) for row in self.train.rows(epoch, after_step=made))
            offset = len(self.train.lengths)
            yield from (Use(epoch, offset + row) for row in self.validation.rows(epoch, after_step=0))
            made = 0


def chunks(uses: Iterable[Use], size: Callable[[int], int], most_bytes: int) -> Iterator[list[int]]:
    """Cut ``uses`` into runs of rows that together take at most ``most_bytes``; none has a row twice, or two epochs.

    Args:
        uses: in the trainer's order.
        size: bytes of a row's state file, by row.
        most_bytes: bytes of a chunk.

    Raises:
        Failed: one row alone takes more.
    """
    rows: list[int] = []
    taken, epoch = 0, 0
    for use in uses:
        needed = size(use.row)
        if needed > most_bytes:
            raise Failed(f"corpus row {use.row} takes {needed:,} bytes of states; a chunk holds {most_bytes:,}")
        if rows and (taken + needed > most_bytes or use.epoch != epoch):
            yield rows
            rows, taken = [], 0
        rows.append(use.row)
        taken, epoch = taken + needed, use.epoch
    if rows:
        yield rows
