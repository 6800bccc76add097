"""What state files are called; needs nothing, so that the control side can name them without torch."""

from pathlib import Path
from urllib.parse import quote

SUFFIX = ".safetensors"


def state_name(sample_id: str) -> str:
    """Name of a sample's state file: the sample id with what a file name cannot hold percent-encoded."""
    return quote(sample_id, safe="")


def state_path(states: Path, name: str) -> Path:
    """Path of the state file called ``name`` in the folder ``states``."""
    return states / f"{name}{SUFFIX}"
