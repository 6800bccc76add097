"""How states are handed over while they are trained on: files by row, which appear checked, are read once and removed.

``stream.json`` in the folder of hidden states names the process that captures and how long a row is waited for;
``stream.ended.json`` says why no more will come. ``hs_<row>.safetensors`` beside them are state files here, not links:
the only channel that the workers of a data loader, each a process of its own, need.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from aerie.artefacts.files import write_json
from aerie.artefacts.state_files import StateFile, link_path, read_states
from aerie.artefacts.state_names import SUFFIX
from aerie.errors import Failed
from aerie.processes import ProcessIdentity

STREAM_FILE = "stream.json"
ENDED_FILE = "stream.ended.json"
ROW_FILE = re.compile(rf"hs_(\d+){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Stream:
    """Who captures, and how long a reader waits for a row before it gives up."""

    producer: ProcessIdentity
    wait_seconds: float


def open_stream(folder: Path, states: Path, stream: Stream) -> None:
    """Begin a stream in ``folder``: whatever an earlier one left is removed, also of ``states``, where files appear."""
    clear_stream(folder, states)
    document = {"producer": stream.producer.model_dump(), "wait_seconds": stream.wait_seconds}
    write_json(folder / STREAM_FILE, document)


def read_stream(folder: Path) -> Stream:
    """The stream that was begun in ``folder``.

    Raises:
        Failed: none was.
    """
    path = folder / STREAM_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Failed(f"{path}: no states are streamed here; train through the stage, which captures them") from None
    return Stream(
        producer=ProcessIdentity.model_validate(document["producer"]), wait_seconds=float(document["wait_seconds"])
    )


def clear_stream(folder: Path, states: Path) -> None:
    """Remove every state file and mark of a stream."""
    sweep(states)
    for path in (folder / STREAM_FILE, folder / ENDED_FILE, *(link_path(folder, row) for row in unread_rows(folder))):
        path.unlink(missing_ok=True)


def sweep(states: Path) -> None:
    """Remove what lies in the folder where files appear: late answers to requests of an earlier stream."""
    for path in states.iterdir():
        path.unlink(missing_ok=True)


def hand_over(captured: Path, folder: Path, row: int) -> None:
    """Let the trainer have a checked state file as that of ``row``."""
    captured.replace(link_path(folder, row))


def unread_rows(folder: Path) -> set[int]:
    """Rows that were handed over and not yet read."""
    return {int(found[1]) for path in folder.iterdir() if (found := ROW_FILE.fullmatch(path.name))}


def take(folder: Path, row: int) -> StateFile | None:
    """Read the states of ``row`` and remove their file; None while they are not there.

    Raises:
        Failed: the file cannot be read.
    """
    path = link_path(folder, row)
    if not path.exists():
        return None
    mapped = read_states(path)
    # A mapped file that is removed keeps its blocks of the disk for as long as something points into it.
    state = StateFile(token_ids=mapped.token_ids.clone(), hidden_states=mapped.hidden_states.clone())
    del mapped
    path.unlink()
    return state


def end_stream(folder: Path, reason: str) -> None:
    """Tell whoever waits that no more states will come, and why."""
    write_json(folder / ENDED_FILE, {"reason": reason})


def why_ended(folder: Path, stream: Stream) -> str | None:
    """Why no more states will come; None while they do."""
    path = folder / ENDED_FILE
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["reason"])
    if stream.producer.find() is None:
        return f"process {stream.producer.pid}, which captured them, is gone"
    return None
