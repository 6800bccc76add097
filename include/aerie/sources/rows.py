"""Raw rows of a source: local files, or a Hugging Face data set at a pinned revision.

Rows stream; memory holds a batch, never the file.
"""

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from aerie.artefacts.parquet import open_parquet
from aerie.errors import BadInput, Retryable
from aerie.settings.pipeline import SourceSettings
from aerie.sources.conversation import Unusable

BATCH_ROWS = 512
CHUNK_CHARACTERS = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class SourceRow:
    """One row and where it stands: ``file:line``, or ``file: row n`` counted from 0. ``problem``: it cannot be read."""

    where: str
    value: Mapping[str, Any]
    problem: Unusable | None = None


def source_files(source: SourceSettings) -> list[Path]:
    """Local files of ``source``, in the order of their names; empty for a Hugging Face source.

    Raises:
        BadInput: the path does not exist, or no file there has a suffix that can be read.
    """
    if source.path is None:
        return []
    if source.path.is_dir():
        candidates = sorted(source.path.rglob("*"))
    elif source.path.exists():
        candidates = [source.path]
    else:
        candidates = sorted(Path(source.path.anchor).glob(str(source.path.relative_to(source.path.anchor))))
    if not candidates:
        raise BadInput(f"{source.path}: no such file or folder (the source's 'path')")
    files = [path for path in candidates if path.is_file() and _format(path) in _READERS]
    if not files:
        raise BadInput(
            f"{source.path}: expected {', '.join(_READERS)} (JSON also with .gz or .zst), found no such file"
        )
    return files


def iterate_source(source: SourceSettings) -> Iterator[SourceRow]:
    """Yield the rows of ``source``; those that its ``where`` leaves out have a ``problem`` that is a rule's.

    Raises:
        BadInput: the source cannot be opened, or a file is damaged beyond single rows.
        Retryable: the hub could not be reached.
    """
    rows = _hub_rows(source) if source.path is None else chain.from_iterable(map(iterate_file, source_files(source)))
    for row in rows:
        problem = row.problem or _left_out(row.value, source.where)
        yield row if problem is row.problem else SourceRow(row.where, row.value, problem)


def iterate_file(path: Path) -> Iterator[SourceRow]:
    """Yield the rows of a local file.

    Raises:
        BadInput: the file cannot be read, is of an unknown format, or is damaged beyond single rows.
    """
    if _format(path) not in _READERS:
        raise BadInput(f"{path}: expected {', '.join(_READERS)} (JSON also with .gz or .zst)")
    try:
        yield from _READERS[_format(path)](path)
    except (OSError, EOFError, pa.ArrowException, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read to its end: {error}") from error


def _left_out(row: Mapping[str, Any], where: Mapping[str, Any]) -> Unusable | None:
    """Why a row's values leave it out, or None."""
    for name, wanted in where.items():
        if name not in row:
            return Unusable("missing_field", f"no column {name!r} for 'where'; the row has {', '.join(row)}")
        if row[name] not in (wanted if isinstance(wanted, tuple) else (wanted,)):
            return Unusable("filtered", f"{name} is {row[name]!r}", by_rule=True)
    return None


def _format(path: Path) -> str:
    """Suffix that tells the format, without the compression's."""
    name = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    return name.suffix


def _hub_rows(source: SourceSettings) -> Iterator[SourceRow]:
    if _COMMIT.fullmatch(source.revision or "") is None:
        raise BadInput(
            f"{source.huggingface}: expected 'revision' to be a commit (40 hex digits), found {source.revision!r}: "
            "a branch or a tag moves, and the same prompts could not be made again"
        )
    # Heavy, and needed only where a source comes from the hub.
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    where = f"{source.huggingface}@{(source.revision or '')[:12]}"
    try:
        rows = load_dataset(
            **_hub_location(source),
            name=source.config,
            split=source.split,
            data_files=list(source.data_files) or None,
            streaming=True,
        )
        for number, row in enumerate(rows):
            yield SourceRow(f"{where}: row {number}", row)
    except (DatasetsError, ValueError) as error:
        raise BadInput(f"{where} (config {source.config}, split {source.split}): cannot be loaded: {error}") from error
    except OSError as error:
        raise Retryable(f"{where}: the hub cannot be reached: {error}") from error


def _hub_location(source: SourceSettings) -> dict[str, Any]:
    """Where ``datasets`` finds the pinned revision: on the hub; offline (``HF_HUB_OFFLINE``), in the hub's cache.

    Raises:
        BadInput: offline, and the revision was never downloaded.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not constants.HF_HUB_OFFLINE or Path(source.huggingface or "").is_dir():
        return {"path": source.huggingface, "revision": source.revision}
    try:
        folder = snapshot_download(
            str(source.huggingface), repo_type="dataset", revision=source.revision, local_files_only=True
        )
    except LocalEntryNotFoundError as error:
        raise BadInput(
            f"{source.huggingface}: HF_HUB_OFFLINE is set and revision {source.revision} is not in the cache; download "
            f"it first: hf download --repo-type dataset --revision {source.revision} {source.huggingface}"
        ) from error
    return {"path": folder}


def _open(path: Path) -> IO[bytes]:
    # Arrow's decompressors notice a file that is cut short; zstandard's reader takes that for its end.
    return cast("IO[bytes]", pa.input_stream(str(path), compression=_COMPRESSIONS.get(path.suffix)))


def _json_rows(path: Path) -> Iterator[SourceRow]:
    """Rows of JSON lines, or of one JSON array: the first character that is not space tells."""
    with _open(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
        start = ""
        while not start.strip() and (character := text.read(1)):
            start += character
        if start.endswith("["):
            yield from _array_rows(path, text)
        else:
            yield from _line_rows(path, text, start)


def _line_rows(path: Path, text: io.TextIOWrapper, start: str) -> Iterator[SourceRow]:
    begun = start.rpartition("\n")[2]
    first = start.count("\n") + 1
    for number, line in enumerate(chain([begun + text.readline()], text), start=first):
        if line.strip():
            yield _row_of(line, f"{path}:{number}")


def _row_of(line: str, where: str) -> SourceRow:
    try:
        line.encode()
        value = json.loads(line)
    except UnicodeEncodeError:
        return SourceRow(where, {}, Unusable("not_utf8", "the line is not valid UTF-8"))
    except (json.JSONDecodeError, RecursionError) as error:
        return SourceRow(where, {}, Unusable("not_json", str(error)))
    return _checked(value, where)


def _checked(value: object, where: str) -> SourceRow:
    if isinstance(value, Mapping):
        return SourceRow(where, value)
    return SourceRow(where, {}, Unusable("not_an_object", f"expected a JSON object, found {type(value).__name__}"))


def _array_rows(path: Path, text: io.TextIOWrapper) -> Iterator[SourceRow]:
    """Elements of a JSON array, decoded one by one as the text comes in."""
    decoder = json.JSONDecoder()
    buffer, number, ended = "", 0, False
    while not ended:
        chunk = text.read(CHUNK_CHARACTERS)
        ended = not chunk
        buffer += chunk
        position = 0
        while (position := _skip_separators(buffer, position)) < len(buffer):
            if buffer[position] == "]":
                return
            try:
                value, position = decoder.raw_decode(buffer, position)
            except json.JSONDecodeError as error:
                if ended:
                    raise BadInput(f"{path}: row {number} of the array is not JSON: {error}") from error
                break
            yield _checked(value, f"{path}: row {number}")
            number += 1
        buffer = buffer[position:]
    raise BadInput(f"{path}: the array is not closed after row {number - 1}: the file is cut short")


def _skip_separators(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    with open_parquet(path) as file:
        yield from _batch_rows(path, file.iter_batches(batch_size=BATCH_ROWS))


def _arrow_rows(path: Path) -> Iterator[SourceRow]:
    """Rows of an Arrow file, or of an Arrow stream as the datasets library writes it."""
    with pa.memory_map(str(path)) as memory:
        try:
            file = pa.ipc.open_file(memory)
        except pa.ArrowInvalid:
            memory.seek(0)
            yield from _batch_rows(path, pa.ipc.open_stream(memory))
        else:
            yield from _batch_rows(path, (file.get_batch(i) for i in range(file.num_record_batches)))


def _batch_rows(path: Path, batches: Iterator[Any]) -> Iterator[SourceRow]:
    number = 0
    for batch in batches:
        for offset in range(0, batch.num_rows, BATCH_ROWS):
            for value in batch.slice(offset, BATCH_ROWS).to_pylist():
                yield SourceRow(f"{path}: row {number}", value)
                number += 1


_READERS: Mapping[str, Callable[[Path], Iterator[SourceRow]]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
