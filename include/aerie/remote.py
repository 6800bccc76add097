"""Stages on hosts without the database: what they leave beside the data, and how the control side records it.

Control side and host share the data root, at one path. The control side leaves a mark there for each run, which a task
on the host must find; the task leaves its request, events and result there, try by try.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from aerie.alerting import Alert
from aerie.artefacts.files import write_text
from aerie.artefacts.manifest import path_of
from aerie.errors import BadInput, Failed, Retryable, one_line
from aerie.recording import record_event, record_result
from aerie.settings.machine import data_root, run_folder_name, server_folder, settings_path
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import Frozen
from aerie.stages import StageRequest, StageResult
from aerie.store.connection import Connection
from aerie.store.queries.recorded_tries import Try, mark_recorded, read_recorded

MARK_FILE = "run.json"
FAILURE_FILE = "failure.json"
Document = TypeVar("Document", bound=BaseModel)
OnEvent = Callable[[StageRequest, Mapping[str, Any], int], None]
_TRY = re.compile(r"try-([0-9]+)")


class RunMark(Frozen):
    """What the control side says of a run to those who share its data root."""

    run_id: str
    control_host: str
    server_folder: Path
    settings: Mapping[str, Any]


class LeftFailure(Frozen):
    """The alert of a failed try, and whether a receiver has it already."""

    alert: Alert
    delivered: bool


def shared_run_folder(run_id: str) -> Path:
    """Folder of a run's mark, and of the tries of its tasks on other hosts.

    Raises:
        BadInput: the run's id is no name for a folder.
    """
    return data_root() / "runs" / run_folder_name(run_id)


def leave_mark(settings: PipelineSettings, run_id: str) -> None:
    """Leave the mark of a run, on the control side.

    Raises:
        BadInput: the server's folder is not below the data root, where other hosts would see it.
    """
    folder = server_folder().resolve()
    if not folder.is_relative_to(data_root().resolve()):
        raise BadInput(
            f"AERIE_SERVER_FOLDER is {folder}, not below the data root {data_root()}: a server that runs on another "
            "host is found through that folder; set it to one below, the same on every host"
        )
    mark = RunMark(
        run_id=run_id,
        control_host=socket.gethostname(),
        server_folder=folder,
        settings=settings.model_dump(mode="json"),
    )
    write_text(shared_run_folder(run_id) / MARK_FILE, mark.model_dump_json(indent=2) + "\n")


def require_mark(settings: PipelineSettings, run_id: str) -> None:
    """Require, on a host without the database, that it sees the control side's data root and has its configuration.

    Raises:
        BadInput: there is no mark of the run, or what it says is not so here; the message says what to change.
    """
    path, here = shared_run_folder(run_id) / MARK_FILE, socket.gethostname()
    try:
        mark = RunMark.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(
            f"{path}: {error.strerror} on host {here}: the control side left the mark of this run in its data root. "
            "Both need the same folder at the same path (AERIE_DATA_ROOT), readable and writable by both users"
        ) from error
    except ValidationError as error:
        raise BadInput(f"{path}: not the mark of a run: {one_line(error)}") from error
    if server_folder().resolve() != mark.server_folder:
        raise BadInput(
            f"AERIE_SERVER_FOLDER is {server_folder()} on host {here}, but {mark.server_folder} on the control side "
            f"{mark.control_host}: set it to the same folder on both"
        )
    mine = json.loads(settings.model_dump_json())
    if differing := sorted(name for name in {*mine, *mark.settings} if mine.get(name) != mark.settings.get(name)):
        raise BadInput(
            f"{settings_path()} on host {here} is not the configuration that {mark.control_host} opened the run with: "
            f"{', '.join(differing)} differ. Make them equal; where both were changed meanwhile, clear open_run too"
        )


def leave_failure(failure: LeftFailure) -> None:
    """Leave the alert of a failed try beside what the try left.

    Raises:
        BadInput: the control side's data root is not there, or the file cannot be written.
    """
    folder = shared_run_folder(str(failure.alert.run_id))
    path = folder / str(failure.alert.task_id) / f"try-{failure.alert.try_number}" / FAILURE_FILE
    try:
        (folder / MARK_FILE).stat()  # elsewhere, nobody would look for it
        write_text(path, failure.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror} on host {socket.gethostname()}") from error


def record_task(
    connection: Connection,
    stage: str,
    run_id: str,
    task_id: str,
    *,
    finished: bool,
    on_event: OnEvent,
    on_failure: Callable[[LeftFailure], None],
) -> StageResult | None:
    """Record what the tries of a task left beside the data; what was recorded before is not recorded again.

    An event whose recording was interrupted is recorded again.

    Args:
        connection: to the store.
        stage: the task's.
        run_id: the run's.
        task_id: the task's.
        finished: whether the task has succeeded: its last try must have left a result then.
        on_event: told of each event that is recorded, with the request of its try and the try's number.
        on_failure: told, once, of each try that failed.

    Returns:
        The result of the last try, None where it left none.

    Raises:
        Retryable: what a finished task left cannot be seen from here (yet).
        Failed: a file is damaged.
    """
    folder = shared_run_folder(run_id) / task_id
    tries = sorted((int(match[1]), path) for path in _entries(folder) if (match := _TRY.fullmatch(path.name)))
    result = None
    for number, path in tries:
        last = finished and number == tries[-1][0]
        one = Try(run_id, task_id, number)
        result = _record_try(connection, stage, one, path, complete=last, on_event=on_event, on_failure=on_failure)
    if finished and result is None:
        raise Retryable(
            f"{folder}: no result of a try: the task has succeeded, but what it left cannot be seen from "
            f"{socket.gethostname()}. Is the data root the same folder at the same path as on the task's host?"
        )
    return result


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _record_try(
    connection: Connection,
    stage: str,
    one: Try,
    folder: Path,
    *,
    complete: bool,
    on_event: OnEvent,
    on_failure: Callable[[LeftFailure], None],
) -> StageResult | None:
    recorded, has_result = read_recorded(connection, one)
    request = _read(folder / "request.json", StageRequest)
    number = 0
    if request is not None:
        for number, event in enumerate(_events(folder / "events.jsonl", complete=complete), start=1):
            if number > recorded:
                on_event(request, event, one.number)
                record_event(connection, stage, request, event)
                mark_recorded(connection, one, events=number, has_result=has_result)
    failure = _read(folder / FAILURE_FILE, LeftFailure)
    if failure is not None:  # the last event of all
        number += 1
        if number > recorded:
            on_failure(failure)
            mark_recorded(connection, one, events=number, has_result=has_result)
    result = _read(folder / "result.json", StageResult)
    if request is not None and result is not None and not has_result:
        _require_outputs(result)
        record_result(connection, request, result)
        mark_recorded(connection, one, events=number, has_result=True)
    return result


def _read(path: Path, kind: type[Document]) -> Document | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failed(
            f"{path}: {error.strerror}: the control side must be able to read what tasks elsewhere left"
        ) from error
    except ValidationError as error:
        raise Failed(f"{path}: damaged: {one_line(error)}; clear the task that left it") from error


def _events(path: Path, *, complete: bool) -> Iterator[Mapping[str, Any]]:
    """Events of a try; the last line of one that was ended may be half of one, that of a ``complete`` one may not."""
    try:
        *lines, rest = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return
    if complete and rest:
        raise Retryable(f"{path}: ends in half a line: the rest of it cannot be seen from {socket.gethostname()} yet")
    for number, line in enumerate(lines, start=1):
        try:
            event: Mapping[str, Any] = json.loads(line)
        except ValueError as error:
            raise Failed(f"{path}, line {number}: damaged: {error}; clear the task that left it") from error
        yield event


def _require_outputs(result: StageResult) -> None:
    """Require that what a stage wrote on its host can be seen from here.

    Raises:
        Retryable: a file is missing, or has another size.
    """
    for output in result.manifest.outputs if result.manifest else ():
        path = path_of(output.uri)
        found = path.stat().st_size if path.is_file() else None
        if found != output.bytes:
            raise Retryable(
                f"{path}: expected {output.bytes:,} bytes as stage {result.stage} wrote them on its host, found "
                f"{'no file' if found is None else f'{found:,}'} on {socket.gethostname()}: is the data root the same?"
            )
