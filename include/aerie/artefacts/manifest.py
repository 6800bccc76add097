"""The manifest of a finished stage: what it read, what it wrote, what it counted.

It is written last. A stage whose manifest already answers its fingerprint and inputs has nothing to do,
and that is what makes every task retryable.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlparse

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.artefacts.files import sha256_of, write_text
from aerie.errors import BadInput

SCHEMA_VERSION = 1


class InputFile(BaseModel):
    """A file that a stage read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    sha256: str


class OutputFile(BaseModel):
    """A file that a stage wrote; ``rows`` is None where the format has no rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    bytes: Annotated[int, Field(ge=0)]
    rows: int | None = None
    sha256: str


class Manifest(BaseModel):
    """Record of one finished stage of one edition (and data set, where the stage works on one)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    stage: str
    edition: str
    dataset: str | None
    fingerprint: str
    inputs: tuple[InputFile, ...]
    outputs: tuple[OutputFile, ...]
    counts: Mapping[str, Any]
    finished_at: datetime

    def output(self, name: str) -> Path:
        """Path of the output whose file name is ``name``.

        Raises:
            BadInput: the manifest lists no such output.
        """
        for output in self.outputs:
            path = path_of(output.uri)
            if path.name == name:
                return path
        raise BadInput(f"manifest of stage {self.stage} ({self.edition}/{self.dataset}) lists no output named {name}")


def path_of(uri: str) -> Path:
    """Local path of a ``file://`` URI.

    Raises:
        BadInput: the URI has another scheme.
    """
    parsed = urlparse(uri)
    if parsed.scheme != "file":
        raise BadInput(f"cannot open {uri}: expected a file:// URI")
    return Path(unquote(parsed.path))


def describe_input(path: Path) -> InputFile:
    """Describe a file that is about to be read."""
    if not path.is_file():
        raise BadInput(f"{path}: expected a file written by an earlier stage; run that stage first")
    return InputFile(uri=path.resolve().as_uri(), sha256=sha256_of(path))


def describe_output(path: Path, rows: int | None = None, sha256: str | None = None) -> OutputFile:
    """Describe a file that was just written; ``sha256`` spares its hash where the writer has it."""
    return OutputFile(
        uri=path.resolve().as_uri(), bytes=path.stat().st_size, rows=rows, sha256=sha256 or sha256_of(path)
    )


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        BadInput: the file is missing or is not a manifest of this schema.
    """
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path}: no manifest; the stage that writes it has not finished") from None
    except ValidationError as error:
        raise BadInput(f"{path}: not a manifest of schema {SCHEMA_VERSION}: {error}") from error


def write_manifest(
    path: Path,
    *,
    stage: str,
    edition: str,
    dataset: str | None,
    fingerprint: str,
    inputs: Sequence[InputFile],
    outputs: Sequence[OutputFile],
    counts: Mapping[str, Any],
) -> Manifest:
    """Write the manifest of a stage that has finished, atomically, and return it."""
    manifest = Manifest(
        schema=SCHEMA_VERSION,
        stage=stage,
        edition=edition,
        dataset=dataset,
        fingerprint=fingerprint,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        counts=counts,
        finished_at=datetime.now(UTC),
    )
    write_text(path, manifest.model_dump_json(indent=2, by_alias=True) + "\n")
    return manifest


def answered_by(
    path: Path, *, fingerprint: str, inputs: Sequence[InputFile], check_contents: bool = False
) -> Manifest | None:
    """Return the manifest at ``path`` when it answers this fingerprint and these inputs, else None.

    Outputs must still exist with the recorded sizes. Their contents are verified by whoever reads them; a stage whose
    readers can only send people back to it has them checked here.
    """
    if not path.exists():
        return None
    manifest = read_manifest(path)
    if manifest.fingerprint != fingerprint or {i.sha256 for i in manifest.inputs} != {i.sha256 for i in inputs}:
        return None
    for output in manifest.outputs:
        written = path_of(output.uri)
        if not written.is_file() or written.stat().st_size != output.bytes:
            return None
        if check_contents and sha256_of(written) != output.sha256:
            return None
    return manifest
