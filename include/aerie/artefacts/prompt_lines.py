"""A file of prompts that someone brings: JSON lines of ``{"prompt_ids": [...], "sample_id": "..."}``, the id optional.

Token ids and not text: which template and tokenizer made them is decided by whoever brings them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.artefacts.prompts import Prompt
from aerie.errors import BadInput, one_line


class PromptLine(BaseModel):
    """One line. ``prompt_ids`` are token ids [prompt_tokens]."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_ids: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
    sample_id: str | None = None


def iterate_prompt_lines(path: Path) -> Iterator[Prompt]:
    """Yield the prompts in file order; one without an id is named after its line.

    Raises:
        BadInput: the file cannot be read, or a line is not such a line; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: the prompts cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            read = PromptLine.model_validate_json(line)
        except ValidationError as error:
            raise BadInput(f'{path}:{number}: expected {{"prompt_ids": [...]}}: {one_line(error)}') from error
        name = read.sample_id or f"line-{number}"
        yield Prompt(name, name, 0, "benchmark", read.prompt_ids, None, number, None)
