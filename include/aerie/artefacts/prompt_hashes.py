"""``prompt_hashes.parquet``: what each prompt of a data set asks, as a hash, by which ``merge`` finds equal prompts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from aerie.artefacts.parquet import RowWriter, iterate_batches, row_writer

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("prompt_hash", pa.binary(16), nullable=False),
    ]
)


class PromptHashWriter:
    """Writer of one row a prompt; see ``prompt_hash_writer``."""

    def __init__(self, writer: RowWriter) -> None:
        self._writer = writer

    def add(self, sample_id: str, split: str, content: str) -> None:
        """Append a prompt with its content hash, in hex."""
        self._writer.write({"sample_id": sample_id, "split": split, "prompt_hash": bytes.fromhex(content)[:16]})


@contextmanager
def prompt_hash_writer(path: Path) -> Iterator[PromptHashWriter]:
    """Yield a writer of ``path``, which appears whole when the block ends well and not at all otherwise."""
    with row_writer(path, SCHEMA) as writer:
        yield PromptHashWriter(writer)


def iterate_prompt_hash_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows, a batch at a time.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    yield from iterate_batches(path, SCHEMA, written_by="prepare")
