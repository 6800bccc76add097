"""``superseded.jsonl``: attempts that somebody asked to have generated again, beside the response log.

The log is append-only and keeps every attempt; this file says which of them count no more. One JSON object a line, the
whole written anew atomically, so that no line is ever torn. A sample is listed once for every time it was asked for.
"""

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.artefacts.files import write_text
from aerie.errors import BadInput

NAME = "superseded.jsonl"


class Superseded(BaseModel):
    """Attempts of a sample up to ``attempt`` count no more; ``reasons`` are the reasons and flags that the last had."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_id: str
    attempt: Annotated[int, Field(ge=0)]
    reasons: tuple[str, ...]
    asked_at: datetime


def superseded_file(log: Path) -> Path:
    """Where the attempts of a response log that count no more are listed."""
    return log.with_name(NAME)


def read_superseded(log: Path) -> dict[str, int]:
    """The last attempt that counts no more, by sample id; empty where nothing was asked for again.

    Raises:
        BadInput: a line is not such an entry.
    """
    latest: dict[str, int] = {}
    for entry in list_superseded(log):
        latest[entry.sample_id] = max(entry.attempt, latest.get(entry.sample_id, 0))
    return latest


def list_superseded(log: Path) -> list[Superseded]:
    """Every entry, oldest first; raises as ``read_superseded`` does."""
    path = superseded_file(log)
    if not path.exists():
        return []
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entries.append(Superseded.model_validate_json(line))
        except ValidationError as error:
            raise BadInput(f"{path}, line {number}: not an entry of this file: {error}; restore the line") from error
    return entries


def add_superseded(log: Path, entries: Iterable[Superseded]) -> None:
    """Add entries; they are on the disk when this returns."""
    known = list_superseded(log)
    write_text(superseded_file(log), "".join(f"{entry.model_dump_json()}\n" for entry in (*known, *entries)))
