"""Reading the next batch while this one is worked on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")


def read_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield what ``batches`` yields, none of it None; a thread is one ahead."""
    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead = reader.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = reader.submit(next, batches, None)
            yield batch
