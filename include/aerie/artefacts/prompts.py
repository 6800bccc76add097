"""``prompts.parquet``: the prompts of one data set, as token ids, in the order in which generation takes them."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa

from aerie.artefacts.parquet import find_row, iterate_batches, iterate_rows, write_rows

Split = Literal["train", "validation", "benchmark"]

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("tools", pa.string()),
        pa.field("admission_rank", pa.int64(), nullable=False),
        pa.field("skip_reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    ``turn`` counts the conversation's answers, from 0. ``tools`` is a JSON list of function declarations, or None.
    ``admission_rank`` is a seeded random order that does not depend on the order of the source. A prompt with a
    ``skip_reason`` is never generated; its ``prompt_ids`` may be empty.
    """

    sample_id: str
    conversation_id: str
    turn: int
    split: Split
    prompt_ids: list[int]
    tools: str | None
    admission_rank: int
    skip_reason: str | None


class PromptTokens(NamedTuple):
    """What generation needs of a prompt. ``prompt_ids`` are int32 [prompt_tokens]."""

    sample_id: str
    split: Split
    admission_rank: int
    skip_reason: str | None
    prompt_ids: "array[int]"


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> int:
    """Write prompts to ``path`` atomically, in the order given, and return how many there were."""
    return write_rows(path, SCHEMA, (vars(prompt) for prompt in prompts))


def iterate_prompts(path: Path) -> Iterator[Prompt]:
    """Yield prompts in file order, which is that of ``admission_rank``.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    for row in iterate_rows(path, SCHEMA, written_by="prepare"):
        yield Prompt(**row)


def iterate_prompt_tokens(path: Path) -> Iterator[PromptTokens]:
    """Yield prompts in file order without a Python object for each id; raises as ``iterate_prompts`` does."""
    for batch in iterate_batches(path, SCHEMA, written_by="prepare", columns=PromptTokens._fields):
        ids = batch.column("prompt_ids")
        values, ends = ids.values.to_numpy(), ids.offsets.to_pylist()
        tokens = (array("i", values[start:end].tobytes()) for start, end in pairwise(ends))
        others = (batch.column(name).to_pylist() for name in PromptTokens._fields[:-1])
        yield from map(PromptTokens._make, zip(*others, tokens, strict=True))


def iterate_prompt_ids(path: Path) -> Iterator[pa.ListArray]:
    """Yield the ids of all prompts, a batch at a time, as lists of int32; raises as ``iterate_prompts`` does."""
    for batch in iterate_batches(path, SCHEMA, written_by="prepare", columns=["prompt_ids"]):
        yield batch.column("prompt_ids")


def find_prompt(path: Path, sample_id: str) -> tuple[int, Prompt] | None:
    """The prompt of a sample and its row number, without reading the tokens of others; raises as above."""
    found = find_row(path, SCHEMA, sample_id, written_by="prepare")
    return (found[0], Prompt(**found[1])) if found else None


def read_prompts(path: Path) -> list[Prompt]:
    """Read every prompt into memory; raises as ``iterate_prompts`` does."""
    return list(iterate_prompts(path))
