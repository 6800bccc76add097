"""The response log: what the server answered, one JSON object a line, append-only.

JSON lines because they survive a torn tail and every tool reads them (jq, grep, pandas). ``output_ids`` is the last
field but one, so that a row's head is read without its tokens; the last is ``crc32``, of the line's bytes before it.

A row that a crash left incomplete is not a row: readers stop before it, the writer cuts it off. A row that was damaged
later is an error that names file and offset; the writer sets such rows aside in ``<log>.corrupt``, so that the log
stays readable and the samples can be generated again.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.artefacts.files import atomic_path, sync_directory
from aerie.errors import Failed, Retryable

TOKENS_FIELD = b',"output_ids":'
CHECKSUM_FIELD = b',"crc32":"'
CHECKSUM_END = b'"}\n'
CHECKSUM_DIGITS = 8

TokenCount = Annotated[int, Field(ge=0)]


class ResponseHead(BaseModel):
    """One answer of the server, without its tokens.

    ``attempt`` numbers the requests sent for a sample, from 1. ``prompt_sha256`` is the function of that
    name, of the prompt ids. ``finish_reason`` and ``meta_info`` are the server's own;
    ``launch_token`` says which server. ``max_new_tokens`` is the cap that the request asked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    sample_id: str
    attempt: Annotated[int, Field(ge=1)]
    prompt_sha256: str
    prompt_tokens: TokenCount
    completion_tokens: TokenCount
    max_new_tokens: TokenCount
    finish_reason: Mapping[str, Any]
    launch_token: str
    meta_info: Mapping[str, Any]


class Response(ResponseHead):
    """One answer of the server; ``output_ids`` are token ids [completion_tokens], the stop token included."""

    output_ids: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A complete row: its head, and where it stands (bytes from the start of the file, its line break included)."""

    head: ResponseHead
    crc32: int
    offset: int
    size: int


@dataclass(frozen=True)
class DamagedRow:
    """A line that is not what was written; ``sample_id`` is a guess from what can still be read of it."""

    path: Path
    offset: int
    size: int
    problem: str
    sample_id: str | None = None

    def __str__(self) -> str:
        guess = f" (perhaps of sample {self.sample_id})" if self.sample_id else ""
        return f"{self.path}: the row at byte {self.offset}, {self.size} bytes long{guess}, {self.problem}"


@dataclass(frozen=True)
class Repair:
    """What opening a log for writing put right: bytes of a torn tail that were cut, rows that were set aside."""

    torn_offset: int | None = None
    torn_bytes: int = 0
    damaged: tuple[DamagedRow, ...] = ()


def prompt_sha256(prompt_ids: Sequence[int]) -> str:
    """SHA-256, in hex, of prompt ids as little-endian int32."""
    return hashlib.sha256(struct.pack(f"<{len(prompt_ids)}i", *prompt_ids)).hexdigest()


def encode(response: Response) -> bytes:
    """One line of the log, its line break included."""
    head = response.model_dump_json(exclude={"output_ids"}).encode()
    ids = ",".join(map(str, response.output_ids)).encode()
    body = head[:-1] + TOKENS_FIELD + b"[" + ids + b"]"
    return body + CHECKSUM_FIELD + b"%08x" % zlib.crc32(body) + CHECKSUM_END


def checksum(line: bytes) -> int:
    """The checksum that a line of ``encode`` carries."""
    end = len(line) - len(CHECKSUM_END)
    return int(line[end - CHECKSUM_DIGITS : end], 16)


def _body(line: bytes) -> bytes | None:
    """The bytes that a line's checksum covers, or None when it does not match."""
    start = len(line) - len(CHECKSUM_END) - CHECKSUM_DIGITS
    body = line[: max(0, start - len(CHECKSUM_FIELD))]
    expected = body + CHECKSUM_FIELD + b"%08x" % zlib.crc32(body) + CHECKSUM_END
    return body if line == expected else None


def _damaged(path: Path, offset: int, line: bytes, problem: str) -> DamagedRow:
    before, _, after = line[:512].partition(b'"sample_id":"')
    name = after.partition(b'"')[0].decode(errors="replace")
    return DamagedRow(path, offset, len(line), problem, name if name and len(before) < len(b'{"') else None)


def _read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        file.seek(start)
        offset = start
        for line in file:
            yield offset, line
            offset += len(line)


def scan(path: Path) -> Iterator[Row | DamagedRow]:
    """Every complete line of the log, in file order, without tokens; nothing where there is no file."""
    if not path.exists():
        return
    for offset, line in _read_lines(path):
        if not line.endswith(b"\n"):
            return
        yield _parse_row(path, offset, line)


def _parse_row(path: Path, offset: int, line: bytes) -> Row | DamagedRow:
    body = _body(line)
    if body is None:
        return _damaged(path, offset, line, "does not match its checksum")
    try:
        head = ResponseHead.model_validate_json(body[: body.rindex(TOKENS_FIELD)] + b"}")
    except (ValueError, ValidationError) as error:
        return _damaged(path, offset, line, f"is not a response: {error}")
    return Row(head, checksum(line), offset, len(line))


def _parse_response(path: Path, offset: int, line: bytes) -> Response | DamagedRow:
    body = _body(line)
    if body is None:
        return _damaged(path, offset, line, "does not match its checksum")
    try:
        return Response.model_validate_json(body + b"}")
    except ValidationError as error:
        return _damaged(path, offset, line, f"is not a response: {error}")


def _require(found: Response | DamagedRow) -> Response:
    if isinstance(found, DamagedRow):
        raise Failed(f"{found}; run generate again: it sets the row aside and generates the sample again")
    return found


def iterate_responses(path: Path) -> Iterator[Response]:
    """Every complete row, in file order; an incomplete last line is none.

    Raises:
        Failed: a row is damaged; the message names file and byte offset.
    """
    for offset, line in _read_lines(path):
        if not line.endswith(b"\n"):
            return
        yield _require(_parse_response(path, offset, line))


def read_response(path: Path, row: Row) -> Response:
    """Read one row whole.

    Raises:
        Failed: the row is damaged.
    """
    with path.open("rb") as file:
        file.seek(row.offset)
        return _require(_parse_response(path, row.offset, file.read(row.size)))


def latest_rows(path: Path) -> dict[str, Row]:
    """The newest row of each sample, by sample id: of the highest attempt, and of those the last in the file.

    Raises:
        Failed: a row is damaged.
    """
    latest: dict[str, Row] = {}
    for row in scan(path):
        if isinstance(row, DamagedRow):
            raise Failed(f"{row}; run generate again: it sets the row aside and generates the sample again")
        known = latest.get(row.head.sample_id)
        if known is None or row.head.attempt >= known.head.attempt:
            latest[row.head.sample_id] = row
    return latest


def latest_responses(path: Path) -> Iterator[Response]:
    """The newest response of each sample, in file order.

    Raises:
        Failed: a row is damaged.
    """
    rows = sorted(latest_rows(path).values(), key=lambda row: row.offset)
    if not rows:
        return
    with path.open("rb") as file:
        for row in rows:
            file.seek(row.offset)
            yield _require(_parse_response(path, row.offset, file.read(row.size)))


def repair(path: Path) -> Repair:
    """Cut a torn tail and set damaged rows aside in ``<log>.corrupt``; nothing where there is no file."""
    if not path.exists():
        return Repair()
    end = 0
    damaged: list[DamagedRow] = []
    for row in scan(path):
        end = row.offset + row.size
        if isinstance(row, DamagedRow):
            damaged.append(row)
    torn = path.stat().st_size - end
    if torn:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    if damaged:
        _set_aside(path, damaged)
    return Repair(end if torn else None, torn, tuple(damaged))


def _set_aside(path: Path, damaged: Sequence[DamagedRow]) -> None:
    # The copies are durable before the log loses the rows.
    aside = path.with_name(f"{path.name}.corrupt")
    offsets = {row.offset for row in damaged}
    with aside.open("ab") as copies:
        copies.writelines(line for offset, line in _read_lines(path) if offset in offsets)
        copies.flush()
        os.fsync(copies.fileno())
    sync_directory(path.parent)
    with atomic_path(path) as clean, clean.open("wb") as file:
        file.writelines(line for offset, line in _read_lines(path) if offset not in offsets)


class ResponseLog:
    """Writer of the log. Rows are durable after ``sync``; ``repaired`` says what opening it put right.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.repaired = repair(path)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._waiting: list[bytes] = []
        sync_directory(path.parent)

    @property
    def waiting(self) -> int:
        """Rows taken and not yet handed to the disk."""
        return len(self._waiting)

    def append(self, response: Response) -> int:
        """Take a row to be written by the next ``sync``; returns its checksum."""
        line = encode(response)
        self._waiting.append(line)
        return checksum(line)

    def take(self) -> list[bytes]:
        """The rows taken so far, for ``write`` in another thread; they wait no longer."""
        lines, self._waiting = self._waiting, []
        return lines

    def sync(self) -> None:
        """Write the rows taken and wait until they are on the disk; raises as ``write`` does."""
        self.write(self.take())

    def write(self, lines: Sequence[bytes]) -> None:
        """Write rows and wait until they are on the disk.

        Raises:
            Retryable: the disk does not take them (it is full, or failing). Nothing of them stays in the file.
        """
        if not lines:
            return
        data = memoryview(b"".join(lines))
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            raise Retryable(
                f"{self.path}: cannot be written: {error.strerror}; free the disk and run generate again"
            ) from error
        self._size += len(data)

    def close(self) -> None:
        """Write what was taken and close the file."""
        try:
            self.sync()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
