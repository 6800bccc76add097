"""``previews.jsonl``: a few decoded samples of a data set, for people to read. Nothing is ever trained from it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.artefacts.files import atomic_path
from aerie.errors import BadInput


class Preview(BaseModel):
    """One sample, decoded.

    ``spans`` are (kind, text) pairs that together are the whole row. Kinds: ``prompt`` (not trained on), ``reasoning``,
    ``boundary`` (a think tag), ``answer``, ``tool`` (a tool token), ``tool_section``, ``tool_id``, ``tool_arguments``,
    ``after_tools``, ``end``, ``after_end``, ``foreign`` (a token that a response may not hold).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_id: str
    conversation_id: str
    split: str
    verdict: Literal["kept", "quarantined"]
    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    positions: Mapping[str, tuple[int, ...]]
    prompt_tokens: int
    response_tokens: int
    reasoning_tokens: int
    spans: tuple[tuple[str, str], ...]


def write_previews(path: Path, previews: Iterable[Preview]) -> int:
    """Write previews to ``path`` atomically, one JSON object a line, and return how many there were."""
    written = 0
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for preview in previews:
            file.write(json.dumps(preview.model_dump(mode="json"), ensure_ascii=False) + "\n")
            written += 1
    return written


def iterate_previews(path: Path) -> Iterator[Preview]:
    """Yield previews in file order.

    Raises:
        BadInput: the file is missing, or a line is not a preview.
    """
    if not path.is_file():
        raise BadInput(f"{path}: not there; run stage validate first")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield Preview.model_validate_json(line)
            except ValidationError as error:
                raise BadInput(f"{path}, line {number}: not a preview: {error}") from error
