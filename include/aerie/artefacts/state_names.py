"""What state files are called; needs nothing, so that the control side can name them without torch."""

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

SUFFIX = ".safetensors"


def state_name(sample_id: str) -> str:
    """Name of a sample's state file: the sample id with what a file name cannot hold percent-encoded."""
    return quote(sample_id, safe="")


def state_path(states: Path, name: str) -> Path:
    """Path of the state file called ``name`` in the folder ``states``."""
    return states / f"{name}{SUFFIX}"


def folder_bytes(states: Path) -> int:
    """Bytes of all files in the folder ``states``, which need not exist."""
    return sum(_sizes(states).values())


def present_bytes(states: Path, sample_ids: Iterable[str]) -> int:
    """Bytes of the state files of these samples that are in the folder ``states``; those of others do not count."""
    sizes = _sizes(states)
    return sum(sizes.get(state_path(states, state_name(sample_id)).name, 0) for sample_id in sample_ids)


def present_tokens(states: Path, samples: Iterable[tuple[str, int]]) -> int:
    """Tokens of those of the samples (id, tokens) whose state file is in the folder ``states``, however stored."""
    there = _sizes(states)
    return sum(tokens for sample_id, tokens in samples if state_path(states, state_name(sample_id)).name in there)


def _sizes(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder)} if folder.is_dir() else {}
