"""What a benchmark outside the pipeline measures."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from aerie.settings.pipeline import PositiveInt, ServerUrl
from aerie.settings.profile import Frozen


class BenchmarkTarget(Frozen):
    """A drafter, or a server that already serves one.

    ``drafter`` is a folder in SGLang's layout, ``drafter_id`` its name in the registry, if it has one. With
    ``server_url`` the server is measured as it is, and compared with ``verifier_url``, the same verifier without a
    drafter, where that is given. Prompts are the edition's held-out ones, or those of ``prompts_file``.
    """

    drafter: Path | None = None
    drafter_id: str | None = None
    server_url: ServerUrl | None = None
    verifier_url: ServerUrl | None = None
    prompts_file: Path | None = None
    concurrency: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        if (self.drafter is None) == (self.server_url is None):
            raise ValueError("expected either a drafter or the URL of a server that serves one")
        if self.verifier_url is not None and self.server_url is None:
            raise ValueError("verifier_url is for a server of someone else's: ours is started with and without drafter")
        return self
