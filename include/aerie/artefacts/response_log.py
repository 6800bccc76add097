"""The response log: what the server answered, one JSON object a line, append-only.

JSON lines because they survive a torn tail and every tool reads them (jq, grep, pandas, DuckDB). ``output_ids`` is the
last field but one, so that a row's head is read without its tokens; the last is ``crc32``, of the line's bytes before
it.

Rows are appended to the live file, ``responses.jsonl``. When that passes a size it is sealed: renamed to
``responses.000001.jsonl`` (so no row is ever in two places), compressed to ``responses.000001.jsonl.gz`` under a
temporary name, read back and compared, synced, renamed, and only then removed; the next open finishes what a crash
interrupted. gzip because nothing has to be installed to read it: ``zcat responses.*.gz | cat - responses.jsonl | jq``,
pandas and DuckDB by the suffix, Python by its standard library. It is written as members of whole rows, about a
mebibyte each, which every reader takes as one stream; a flipped bit costs the rows of one member at most.

Beside a sealed segment lies an index of its rows, ``responses.000001.index.json.gz``, so that a resume need not
decompress a day of responses. It holds only for a segment of the size and SHA-256 that it names, and is made again
otherwise.

A row that a crash left incomplete is not a row: readers stop before it, the writer cuts it off. A row that was damaged
later is an error that names file and offset (in a sealed segment, the offset in what it decompresses to); the writer
sets it aside in ``*.corrupt``, so that the log stays readable and the sample can be generated again. Nothing here
depends on the clock: which row of a sample counts follows from its attempt, then from its place.
"""

import gzip
import hashlib
import io
import mmap
import os
import shutil
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from aerie.artefacts.files import atomic_path, sha256_of, sync_directory
from aerie.artefacts.superseded import read_superseded
from aerie.errors import Failed, Retryable

SEGMENT_BYTES = 256 << 20
MEMBER_BYTES = 1 << 20
COMPRESSION_LEVEL = 1  # digits: level 6 saves a tenth more and takes eight times as long
LONGEST_ROW_BYTES = 64 << 20
READ_BYTES = 1 << 20
INFLATE_BYTES = 16 << 10  # what a member's damage may take with it
MEMBER_START = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"  # of a gzip member without a name and without a time

TOKENS_FIELD = b',"output_ids":'
CHECKSUM_FIELD = b',"crc32":"'
CHECKSUM_END = b'"}'
CHECKSUM_BYTES = len(CHECKSUM_FIELD) + 8 + len(CHECKSUM_END)

Found = TypeVar("Found")
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


class Row(NamedTuple):
    """A complete row: what reconciliation needs of its head, and where it stands.

    ``path`` is a file of the log; ``offset`` and ``size`` are bytes of what it holds (of a sealed segment,
    decompressed), the line break included.
    """

    path: Path
    offset: int
    size: int
    crc32: int
    sample_id: str
    attempt: int
    prompt_sha256: str
    completion_tokens: int


@dataclass(frozen=True)
class Damage:
    """Bytes of the log that are not what was written: ``lines`` lines in a row, from ``offset``.

    ``sample_id`` is a guess from what can still be read of the first. ``incomplete``: the file ends in it, without a
    line break.
    """

    path: Path
    offset: int
    size: int
    problem: str
    sample_id: str | None = None
    lines: int = 1
    incomplete: bool = False

    def __str__(self) -> str:
        guess = f" (perhaps of sample {self.sample_id})" if self.sample_id else ""
        more = f" (and {self.lines - 1} more after it)" if self.lines > 1 else ""
        return f"{self.path}: the row at byte {self.offset}{more}, {self.size} bytes long{guess}, {self.problem}"


@dataclass(frozen=True)
class Repair:
    """What opening a log for writing put right: the torn tail that was cut, and what was set aside."""

    torn: Damage | None = None
    damaged: tuple[Damage, ...] = ()


def prompt_sha256(prompt_ids: Sequence[int]) -> str:
    """SHA-256, in hex, of prompt ids as little-endian int32."""
    ids = prompt_ids if isinstance(prompt_ids, array) else array("i", prompt_ids)
    if sys.byteorder == "big":
        ids = array("i", ids)
        ids.byteswap()
    return hashlib.sha256(ids).hexdigest()


# One row


def encode(response: Response) -> bytes:
    """One line of the log, its line break included."""
    head = response.model_dump_json(exclude={"output_ids"}).encode()
    body = head[:-1] + TOKENS_FIELD + to_json(response.output_ids)
    return body + _ending(zlib.crc32(body)) + b"\n"


def checksum(line: bytes) -> int:
    """The checksum that a line of ``encode`` carries."""
    end = len(line.removesuffix(b"\n")) - len(CHECKSUM_END)
    return int(line[end - 8 : end], 16)


def _ending(crc32: int) -> bytes:
    return CHECKSUM_FIELD + b"%08x" % crc32 + CHECKSUM_END


def _checked(line: bytes) -> int | None:
    """The checksum of a line without its line break, or None when the line does not match it."""
    crc32 = zlib.crc32(memoryview(line)[:-CHECKSUM_BYTES])
    return crc32 if line[-CHECKSUM_BYTES:] == _ending(crc32) else None


def _parse_row(path: Path, offset: int, line: bytes) -> Row | Damage:
    crc32 = _checked(line)
    if crc32 is None:
        return _damage(path, offset, line, "does not match its checksum")
    tokens = line.rfind(b"[") - len(TOKENS_FIELD)
    try:
        head = ResponseHead.model_validate_json(line[: max(0, tokens)] + b"}")
    except ValidationError as error:
        return _damage(path, offset, line, f"is not a response: {error}")
    return Row(
        path, offset, len(line) + 1, crc32, head.sample_id, head.attempt, head.prompt_sha256, head.completion_tokens
    )  # fmt: skip


def _parse_response(path: Path, offset: int, line: bytes) -> Response | Damage:
    if _checked(line) is None:
        return _damage(path, offset, line, "does not match its checksum")
    try:
        return Response.model_validate_json(line[:-CHECKSUM_BYTES] + b"}")
    except ValidationError as error:
        return _damage(path, offset, line, f"is not a response: {error}")


def _damage(path: Path, offset: int, line: bytes, problem: str) -> Damage:
    before, _, after = line[:512].partition(b'"sample_id":"')
    name = after.partition(b'"')[0].decode(errors="replace")
    return Damage(path, offset, len(line) + 1, problem, name if name and len(before) < len(b'{"') else None)


# Files of lines


def log_files(log: Path) -> list[Path]:
    """The files that hold the rows of a log, in the order of the rows: sealed segments, then the live file."""
    return [*_segments(log).values(), log]


def _segments(log: Path) -> dict[int, Path]:
    """The sealed segments by number, in order. One whose compression a crash interrupted is read as it was before."""
    found: dict[int, Path] = {}
    for suffix in (f"{log.suffix}.gz", log.suffix):
        for path in log.parent.glob(f"{log.stem}.[0-9]*{suffix}"):
            number = path.name[len(log.stem) + 1 : -len(suffix)]
            if number.isdigit():
                found[int(number)] = path
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class _Gap:
    """Bytes of a compressed file that do not decompress."""

    offset: int
    size: int
    problem: str


def _read_chunks(path: Path) -> Iterator[bytes | _Gap]:
    if path.suffix == ".gz":
        yield from _inflate(path)
        return
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            yield chunk


def _inflate(path: Path) -> Iterator[bytes | _Gap]:
    """What a compressed file holds. After damage it goes on with the next member."""
    size = path.stat().st_size
    if not size:
        yield _Gap(0, 0, "the file is empty")
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        while start < size:
            end, problem = yield from _inflate_member(data, start)
            if problem is not None:
                following = data.find(MEMBER_START, start + 1)
                end = following if following > 0 else size
                yield _Gap(start, end - start, problem)
            start = end


def _inflate_member(data: mmap.mmap, start: int) -> Generator[bytes, None, tuple[int, str | None]]:
    """Yield what a member holds; return where it ends, and what is wrong with it if anything is."""
    inflater, at = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), start
    try:
        while not inflater.eof:
            piece = data[at : at + INFLATE_BYTES]
            if not piece:
                return at, "it ends early"
            at += len(piece)
            yield inflater.decompress(piece)
    except zlib.error as error:
        return at, str(error)
    return at - len(inflater.unused_data), None


def _read_lines(path: Path) -> Iterator[tuple[int, bytes] | Damage]:
    """Every line of a file with its offset, without its line break. Memory holds one line, of bounded length.

    A line that is too long to be a row, that is lost with what does not decompress, or that has no line break is
    yielded as damage.
    """
    offset, carry, held = 0, list[bytes](), 0  # held: length of the line so far; past the longest row, carry is empty
    for chunk in _read_chunks(path):
        if isinstance(chunk, _Gap):
            where = f"compressed bytes {chunk.offset} to {chunk.offset + chunk.size}"
            yield Damage(path, offset, held, f"cannot be decompressed: {chunk.problem} ({where})")
            offset, carry, held = offset + held, [], 0
            continue
        first, line_break, rest = chunk.partition(b"\n")
        carry.append(first)
        held += len(first)
        too_long = held > LONGEST_ROW_BYTES
        if line_break:
            yield Damage(path, offset, held + 1, "is too long to be a row") if too_long else (offset, b"".join(carry))
            offset += held + 1
            *whole, last = rest.split(b"\n")
            for line in whole:
                yield offset, line
                offset += len(line) + 1
            carry, held = [last], len(last)
        elif too_long:
            carry = []
    if held:
        yield replace(_damage(path, offset, b"".join(carry), "is incomplete"), size=held, incomplete=True)


def _scan_file(path: Path) -> Iterator[Row | Damage]:
    """Every line of a file as a row or as damage; damaged lines that follow each other are one damage."""
    pending: Damage | None = None
    for item in _read_lines(path):
        found = item if isinstance(item, Damage) else _parse_row(path, *item)
        if pending and isinstance(found, Damage) and found.problem == pending.problem:
            pending = replace(pending, size=pending.size + found.size, lines=pending.lines + 1)
            continue
        if pending:
            yield pending
        pending = found if isinstance(found, Damage) else None
        if not isinstance(found, Damage):
            yield found
    if pending:
        yield pending


def _is_torn(found: Row | Damage, log: Path) -> bool:
    """Whether a crash while writing explains it: only the live file may end in half a row."""
    return isinstance(found, Damage) and found.incomplete and found.path == log


# Reading


def scan(log: Path) -> Iterator[Row | Damage]:
    """Every complete row of the log, in order, without tokens, and what is damaged; nothing where there is no log."""
    for path in filter(Path.exists, log_files(log)):
        yield from _read_index(path) or (found for found in _scan_file(path) if not _is_torn(found, log))


def _refuse(damage: Damage) -> Failed:
    return Failed(f"{damage}; run generate again: it sets the row aside and generates the sample again")


def iterate_responses(log: Path) -> Iterator[Response]:
    """Every complete row, in order; an incomplete last line is none.

    Raises:
        Failed: a row is damaged; the message names file and byte offset.
    """
    for path in filter(Path.exists, log_files(log)):
        for item in _read_lines(path):
            found = item if isinstance(item, Damage) else _parse_response(path, *item)
            if isinstance(found, Response):
                yield found
            elif not _is_torn(found, log):
                raise _refuse(found)


def latest_rows(log: Path) -> dict[str, Row]:
    """The newest row of each sample, by sample id: of the highest attempt, and of those the last in the log.

    A sample that was asked for again (``aerie.artefacts.superseded``) has none until it has been generated anew.

    Raises:
        BadInput: what was asked for again cannot be read.
        Failed: a row is damaged.
    """
    latest: dict[str, Row] = {}
    superseded = read_superseded(log)
    for row in scan(log):
        if isinstance(row, Damage):
            raise _refuse(row)
        if row.attempt <= superseded.get(row.sample_id, 0):
            continue
        known = latest.get(row.sample_id)
        if known is None or row.attempt >= known.attempt:
            latest[row.sample_id] = row
    return latest


def read_responses(rows: Iterable[Row]) -> Iterator[tuple[Row, Response]]:
    """Read rows whole, in the order of the log; each file is read once, from front to back.

    Raises:
        Failed: a row is damaged, or not there any more.
    """
    in_order = sorted(rows, key=lambda row: (row.path.name, row.offset))
    for path, group in groupby(in_order, key=lambda row: row.path):
        wanted = list(group)
        for row, (offset, line) in zip(wanted, _read_wanted(path, wanted), strict=True):
            found = _parse_response(path, offset, line)
            if isinstance(found, Damage):
                raise _refuse(found)
            yield row, found


def _read_wanted(path: Path, wanted: Sequence[Row]) -> Iterator[tuple[int, bytes]]:
    if path.suffix != ".gz":
        with path.open("rb") as file:
            for row in wanted:
                file.seek(row.offset)
                yield row.offset, file.read(row.size - 1)
        return
    lines = _read_lines(path)
    for row in wanted:
        for item in lines:
            if isinstance(item, Damage):
                raise _refuse(item)
            if item[0] == row.offset:
                yield item
                break
        else:
            raise Failed(f"{path}: has no row at byte {row.offset} any more; run generate again")


def latest_responses(log: Path) -> Iterator[Response]:
    """The newest response of each sample, in the order of the log.

    Raises:
        Failed: a row is damaged.
    """
    for _, response in read_responses(latest_rows(log).values()):
        yield response


def read_latest(log: Path, sample_ids: Iterable[str]) -> dict[str, Response]:
    """The newest responses of some samples, by sample id, of a log that may be written meanwhile.

    Raises:
        Failed: a row is damaged.
    """
    wanted = list(sample_ids)

    def read() -> dict[str, Response]:
        rows = latest_rows(log)
        found = read_responses(rows[sample_id] for sample_id in wanted if sample_id in rows)
        return {row.sample_id: response for row, response in found}

    return while_written(log, read)


def find_row(log: Path, sample_id: str) -> bytes | None:
    """The newest row of one sample as it stands in the log, without its line break; None where it has none.

    For people who look at one row of a long log: the live file is searched as bytes, and of a sealed segment only the
    index is read, and then the part before the row. An index is taken at its word, and the row then checked.

    Raises:
        BadInput: what was asked for again cannot be read.
        Failed: the row is damaged, or a sealed segment has no index.
    """
    return while_written(log, lambda: _find_row(log, sample_id))


def _find_row(log: Path, sample_id: str) -> bytes | None:
    rows = [row for path in filter(Path.exists, log_files(log)) for row in _rows_of_sample(path, sample_id)]
    superseded = read_superseded(log).get(sample_id, 0)
    counting = [row for row in rows if row.attempt > superseded]
    if not counting:
        return None
    # Of the highest attempt, and of those the last: Python's sort is stable.
    row = sorted(counting, key=lambda one: one.attempt)[-1]
    ((offset, line),) = _read_wanted(row.path, [row])
    found = _parse_row(row.path, offset, line)
    if isinstance(found, Damage):
        raise _refuse(found)
    return line


def _rows_of_sample(path: Path, sample_id: str) -> Iterator[Row]:
    if path.suffix == ".gz":
        rows = _indexed_rows(path)
        if rows is None:
            raise Failed(f"{path}: has no index ({_index_path(path).name}); the next generate makes it again")
        yield from (row for row in rows if row.sample_id == sample_id)
        return
    if not path.stat().st_size:
        return
    beginning = b'{"sample_id":' + to_json(sample_id) + b","
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(beginning)
        while start >= 0:
            end = data.find(b"\n", start)
            if end < 0:
                return  # torn: no row
            if start == 0 or data[start - 1] == ord("\n"):
                row = _parse_row(path, start, data[start:end])
                if isinstance(row, Damage):
                    raise _refuse(row)
                yield row
            start = data.find(beginning, end)


def while_written(log: Path, read: Callable[[], Found]) -> Found:
    """What ``read`` finds; it is called again where the log's files were sealed under its hands."""
    while True:
        before = _identities(log)
        try:
            found = read()
        except (Failed, FileNotFoundError):
            if _identities(log) == before:
                raise
            continue
        if _identities(log) == before:
            return found


def _identities(log: Path) -> set[tuple[str, int]]:
    found = set()
    for path in log_files(log):
        with suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


# Sealed segments


class _Index(BaseModel):
    """The rows of a sealed segment, column by column, and the segment that they are of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    segment_bytes: int
    segment_sha256: str
    offset: list[int]
    size: list[int]
    crc32: list[int]
    sample_id: list[str]
    attempt: list[int]
    prompt_sha256: list[str]
    completion_tokens: list[int]


_INDEX_COLUMNS = Row._fields[1:]


def _index_path(segment: Path) -> Path:
    return segment.with_name(segment.name.removesuffix(".jsonl.gz") + ".index.json.gz")


def _read_index(segment: Path) -> list[Row] | None:
    """The rows of a sealed segment, or None where the index is missing, damaged, or of another segment."""
    return _indexed_rows(segment, check_contents=True) if segment.suffix == ".gz" else None


def _indexed_rows(segment: Path, *, check_contents: bool = False) -> list[Row] | None:
    """The same; without ``check_contents`` a segment is known by its size, not by its SHA-256."""
    try:
        index = _Index.model_validate_json(gzip.decompress(_index_path(segment).read_bytes()))
    except (FileNotFoundError, gzip.BadGzipFile, EOFError, zlib.error, ValidationError):
        return None
    if segment.stat().st_size != index.segment_bytes:
        return None
    if check_contents and sha256_of(segment) != index.segment_sha256:
        return None
    columns = [getattr(index, name) for name in _INDEX_COLUMNS]
    return [Row(segment, *values) for values in zip(*columns, strict=True)]


def _write_index(segment: Path, rows: Sequence[Row]) -> None:
    columns = dict(zip(_INDEX_COLUMNS, map(list, list(zip(*rows, strict=True))[1:]), strict=True))
    index = _Index(segment_bytes=segment.stat().st_size, segment_sha256=sha256_of(segment), **columns)
    with atomic_path(_index_path(segment)) as temporary:
        temporary.write_bytes(gzip.compress(index.model_dump_json().encode(), COMPRESSION_LEVEL, mtime=0))


def _seal(plain: Path, rows: Sequence[Row]) -> list[Row]:
    """Compress a segment all of whose lines are ``rows``; returns them at their new place.

    Raises:
        Retryable: it does not read back as it was written.
    """
    segment = plain.with_name(f"{plain.name}.gz")
    with atomic_path(segment) as temporary:
        _compress(temporary, _lines_of(plain, rows))
    moved = [row._replace(path=segment) for row in rows]
    _write_index(segment, moved)
    plain.unlink()
    sync_directory(plain.parent)
    return moved


def _lines_of(path: Path, rows: Sequence[Row]) -> Iterator[bytes]:
    """The lines of a file that are these rows."""
    offsets = {row.offset for row in rows}
    for item in _read_lines(path):
        if not isinstance(item, Damage) and item[0] in offsets:
            yield item[1] + b"\n"


def _compress(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines as gzip members of about a mebibyte, and read them back."""
    written = _Digest()
    with path.open("wb") as file:
        for member in _members(lines):
            written.add(member)
            file.write(gzip.compress(member, COMPRESSION_LEVEL, mtime=0))
    read = _Digest()
    for chunk in _inflate(path):
        if isinstance(chunk, bytes):
            read.add(chunk)
    if read != written:
        raise Retryable(f"{path}: does not read back as it was written; check the disk, and run generate again")


@dataclass
class _Digest:
    """Length and checksum of a stream."""

    size: int = 0
    crc32: int = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def _members(lines: Iterable[bytes]) -> Iterator[bytes]:
    member = io.BytesIO()
    for line in lines:
        member.write(line)
        if member.tell() >= MEMBER_BYTES:
            yield member.getvalue()
            member = io.BytesIO()
    if member.tell():
        yield member.getvalue()


# Recovery


def _recover(log: Path, segment_bytes: int) -> tuple[Repair, list[Row]]:
    """Put the log right and finish what a crash interrupted; returns what that was, and every row of the log."""
    for left_over in log.parent.glob(f".{log.stem}.*.partial*"):
        left_over.unlink()
    rows: list[Row] = []
    damaged: list[Damage] = []
    for path in _segments(log).values():
        found, wrong = _recover_segment(path)
        rows += found
        damaged += wrong
    found, wrong = _mend(log) if log.exists() else ([], [])
    torn = next((damage for damage in wrong if _is_torn(damage, log)), None)
    if sum(row.size for row in found) >= segment_bytes:
        plain = _next_segment(log)
        log.rename(plain)
        found = _seal(plain, found)
    return Repair(torn, (*damaged, *(damage for damage in wrong if damage is not torn))), rows + found


def _recover_segment(path: Path) -> tuple[list[Row], list[Damage]]:
    indexed = _read_index(path)
    if indexed is not None:
        return indexed, []
    rows, damaged = _mend(path)
    if not rows:
        path.unlink()
    elif path.suffix == ".gz":
        _write_index(path, rows)
    else:
        rows = _seal(path, rows)
    return rows, damaged


def _mend(path: Path) -> tuple[list[Row], list[Damage]]:
    """Keep the good rows of a file, and set aside what is damaged; returns both."""
    rows: list[Row] = []
    damaged: list[Damage] = []
    for found in _scan_file(path):
        (damaged if isinstance(found, Damage) else rows).append(found)  # type: ignore[arg-type]
    inside = damaged
    if path.suffix != ".gz" and damaged and damaged[-1].incomplete:
        _cut(path, damaged[-1].offset)  # needs no space, as a copy would on a full disk
        inside = damaged[:-1]
    if not inside:
        return rows, damaged
    # The copies are durable before the log loses anything.
    _set_aside(path, inside)
    with atomic_path(path) as temporary:
        if path.suffix == ".gz":
            _compress(temporary, _lines_of(path, rows))
        else:
            with temporary.open("wb") as file:
                file.writelines(_lines_of(path, rows))
    return _close_up(rows), damaged


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def _close_up(rows: Sequence[Row]) -> list[Row]:
    """Rows at the places that they have when nothing else is in their file."""
    closed, offset = [], 0
    for row in rows:
        closed.append(row._replace(offset=offset))
        offset += row.size
    return closed


def _set_aside(path: Path, damaged: Sequence[Damage]) -> None:
    """Copy damaged lines; of a compressed file, which they are part of, the whole."""
    if path.suffix == ".gz":
        aside = path.with_name(f"{path.name}.{sha256_of(path)[:12]}.corrupt")
        with atomic_path(aside) as temporary:
            shutil.copyfile(path, temporary)
        return
    with path.open("rb") as file, path.with_name(f"{path.name}.corrupt").open("ab") as aside_file:
        for damage in damaged:
            file.seek(damage.offset)
            _copy(file, aside_file, damage.size)
        aside_file.flush()
        os.fsync(aside_file.fileno())
    sync_directory(path.parent)


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size and (data := source.read(min(size, READ_BYTES))):
        target.write(data)
        size -= len(data)


def _next_segment(log: Path) -> Path:
    number = max(_segments(log), default=0) + 1
    return log.with_name(f"{log.stem}.{number:06d}{log.suffix}")


# Writing


class ResponseLog:
    """Writer of the log. Rows are durable after ``sync``; ``repaired`` says what opening it put right.

    The live file is sealed when it reaches ``segment_bytes``. There must be no other writer.

    Raises:
        Retryable: the disk cannot be read or written.
    """

    def __init__(self, path: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = path
        self._segment_bytes = segment_bytes
        self._waiting: list[bytes] = []
        with _on_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.repaired, self._rows = _recover(path, segment_bytes)
            self._file: BinaryIO = path.open("ab", buffering=0)
            self._size = path.stat().st_size
            sync_directory(path.parent)
        self.row_counts = Counter({path: 0})
        self.row_counts.update(row.path for row in self._rows)

    def take_rows(self) -> list[Row]:
        """The rows that the log held when it was opened, in order; they are handed over, and asked for once."""
        rows, self._rows = self._rows, []
        return rows

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
        """Write rows and wait until they are on the disk; then seal the file if it is large enough.

        Raises:
            Retryable: the disk does not take them (it is full, or failing): nothing of them stays in the file. Or it
                does not take the sealed segment: then they stay.
        """
        if not lines:
            return
        with _on_disk(self.path):
            self._append(memoryview(b"".join(lines)))
            self.row_counts[self.path] += len(lines)
            if self._size >= self._segment_bytes:
                self._rotate()

    def _append(self, data: memoryview) -> None:
        descriptor = self._file.fileno()
        # Half a row may have stayed here when the disk failed the last time; nothing may follow it.
        os.ftruncate(descriptor, self._size)
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, self._size)
            raise
        self._size += len(data)

    def _rotate(self) -> None:
        plain = _next_segment(self.path)
        self.path.rename(plain)
        full, self._file, self._size = self._file, self.path.open("ab", buffering=0), 0
        full.close()
        sync_directory(self.path.parent)
        rows: list[Row] = []
        for found in _scan_file(plain):
            if isinstance(found, Damage):
                raise Retryable(f"{found}, although it was just written; check the disk, and run generate again")
            rows.append(found)
        sealed = _seal(plain, rows)
        self.row_counts[sealed[0].path] = self.row_counts[self.path]
        self.row_counts[self.path] = 0

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


@contextmanager
def _on_disk(log: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Retryable(
            f"{error.filename or log}: cannot be written: {error.strerror}; free the disk and run generate again"
        ) from error
