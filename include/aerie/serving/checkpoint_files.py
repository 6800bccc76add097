"""Whether the files of a checkpoint are whole: every shard that its index names, as long as its own header says.

Standard library only, because a launch and a download ask it in different environments. Headers are read, weights are
not: half a terabyte takes seconds.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aerie.errors import BadInput

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LENGTH_BYTES = 8
MAXIMUM_HEADER_BYTES = 100_000_000
"""The format's own limit."""

PLAIN_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
"""Loaded in the type that the server is asked for; quantised weights stay as they are stored."""

GIT_LFS_POINTER = b"version https://git-lfs"


def verify_checkpoint(folder: Path) -> list[str]:
    """What is wrong with a checkpoint's files, one line each that names the file; empty where they are whole."""
    try:
        if not folder.is_dir():
            return [f"{folder}: there is no such folder"]
        return [*_configuration_problems(folder), *_weights_problems(folder)]
    except OSError as error:
        return [f"{error.filename or folder}: cannot be read: {error.strerror}"]


def weights_bytes(folder: Path, *, dtype_bytes: int) -> int:
    """What a checkpoint's weights take in memory, when those of plain numbers are loaded in a type of ``dtype_bytes``.

    Raises:
        BadInput: a file's header cannot be read; the message says what is wrong with it.
    """
    index = folder / INDEX_FILE
    shards = _read_index(index) if index.exists() else {path.name: set() for path in folder.glob("*.safetensors")}
    if isinstance(shards, str):
        raise BadInput(shards)
    total = 0
    for name in shards:
        header = _read_header(folder / name)
        if isinstance(header, str):
            raise BadInput(header)
        for entry in header.values():
            if entry["dtype"] in PLAIN_DTYPES:
                total += math.prod(entry["shape"]) * dtype_bytes
            else:
                begin, end = entry["data_offsets"]
                total += end - begin
    return total


def _configuration_problems(folder: Path) -> Iterator[str]:
    document = _read_json(folder / "config.json")
    if isinstance(document, str):
        yield document


def _weights_problems(folder: Path) -> Iterator[str]:
    index = folder / INDEX_FILE
    present = {path.name for path in folder.glob("*.safetensors")}
    if index.exists():
        shards = _read_index(index)
        if isinstance(shards, str):
            yield shards
            return
    elif SINGLE_FILE in present or len(present) == 1:
        shards = {name: set() for name in present}
    else:
        yield (
            f"{folder}: {len(present)} weight files and no {INDEX_FILE}, which names those that belong to the model"
            if present
            else f"{folder}: no weights (*.safetensors)"
        )
        return
    for name, tensors in sorted(shards.items()):
        yield from _shard_problems(folder / name, tensors)


def _read_index(path: Path) -> dict[str, set[str]] | str:
    """Names of the tensors in each shard, or what is wrong with the index."""
    document = _read_json(path)
    if isinstance(document, str):
        return document
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return f"{path}: expected 'weight_map', the shard of each tensor"
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            return f"{path}: weight_map.{tensor} is {shard!r}: expected the name of a file beside the index"
        shards.setdefault(shard, set()).add(tensor)
    return shards


def _shard_problems(path: Path, tensors: set[str]) -> Iterator[str]:
    if not path.is_file():
        yield f"{path}: missing, with {len(tensors):,} tensors of the index"
        return
    header = _read_header(path)
    if isinstance(header, str):
        yield header
        return
    if missing := sorted(tensors - header.keys()):
        yield f"{path}: lacks {len(missing):,} of {len(tensors):,} tensors that the index puts here, as {missing[0]}"


def _read_header(path: Path) -> Mapping[str, Any] | str:
    """Entries of a safetensors file by tensor, or what is wrong with the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        rest = file.read(min(length, MAXIMUM_HEADER_BYTES))
    if (start + rest).startswith(GIT_LFS_POINTER):
        return f"{path}: a Git LFS pointer of {size} bytes, not the weights that it stands for"
    if len(start) < LENGTH_BYTES or len(rest) < length:
        return f"{path}: {size:,} bytes, cut in its header, or not a safetensors file"
    try:
        entries = {name: entry for name, entry in json.loads(rest).items() if name != "__metadata__"}
        ranges = sorted(tuple(map(int, entry["data_offsets"])) for entry in entries.values())
        end = 0
        for begin, end_of_tensor in ranges:
            if begin != end or end_of_tensor < begin:
                return f"{path}: its header leaves a gap, or tensors overlap, at byte {begin:,} of the data: damaged"
            end = end_of_tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path}: its header cannot be read ({type(error).__name__}: {error}): damaged"
    wanted = LENGTH_BYTES + length + end
    if size != wanted:
        return f"{path}: {size:,} bytes, its header says {wanted:,}: {'cut' if size < wanted else 'damaged'}"
    return entries


def _read_json(path: Path) -> dict[str, Any] | str:
    """A JSON object, or what is wrong with its file."""
    if not path.is_file():
        return f"{path}: missing"
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        return f"{path}: not JSON ({error}): cut, or damaged"
    return document if isinstance(document, dict) else f"{path}: expected a JSON object"
