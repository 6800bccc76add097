"""Files appear whole or not at all: written under a temporary name, synced, then renamed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HASH_CHUNK_BYTES = 1 << 20


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it is synced and renamed to ``path``.

    The temporary file keeps the suffix of ``path``, for writers that choose a format by it. On an
    exception the temporary file is removed and ``path`` is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new temporary folder beside ``folder``; on success it takes the place of ``folder``.

    An older ``folder`` is removed just before the rename: a crash between the two leaves no folder, never half of one.
    On an exception the temporary folder is removed and ``folder`` is left as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                sync_file(path)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.replace(folder)
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_partial_folders(folder: Path) -> None:
    """Remove what killed processes left of ``folder``; nobody else may be writing it."""
    for partial in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(partial)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    with path.open("rb") as written:
        os.fsync(written.fileno())


def sync_directory(directory: Path) -> None:
    """Make a rename inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, document: Any) -> None:
    """Write ``document`` to ``path`` atomically, as indented JSON."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def sha256_of(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint_of(document: Any) -> str:
    """SHA-256, in hex, of a JSON-like ``document`` in canonical form (sorted keys, no spaces)."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
