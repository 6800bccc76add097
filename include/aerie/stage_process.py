"""Runs a stage as a process in its own environment, and follows its events.

The process stays in the caller's process group, and never outlives its caller, nor the caller its own parent: a task
whose worker was killed, which runs no ``on_kill``, is tried again, and the stage of the first try would renew the
server's lease and hold the data set against the second.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.artefacts.files import write_text
from aerie.errors import AerieError, BadInput, Busy, Failed, Retryable
from aerie.masking import masked
from aerie.processes import die_with_parent
from aerie.settings.machine import python_of, variables_of
from aerie.stages import STAGES, StageRequest, StageResult

POLL_SECONDS = 0.5
STOP_GRACE_SECONDS = 20
Event = Mapping[str, Any]
ERRORS: Mapping[int, type[AerieError]] = {kind.exit_code: kind for kind in (Failed, BadInput, Retryable, Busy)}


@dataclass
class StageProcess:
    """One run of one stage. ``folder`` receives request, result, events and the process's output."""

    stage: str
    request: StageRequest
    folder: Path
    on_event: Callable[[Event], None]

    def __post_init__(self) -> None:
        """No process yet."""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> StageResult:
        """Run the stage to its end.

        The kernel ends the stage when the thread that called this ends.

        Raises:
            BadInput, Failed, Retryable: as the stage's exit code says; the message is the stage's own.
            Retryable: the caller's parent (a task's worker) has died; the stage was ended.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = {name: self.folder / name for name in ("request.json", "result.json", "events.jsonl", "output.log")}
        for name in ("result.json", "events.jsonl", "output.log"):
            paths[name].unlink(missing_ok=True)
        paths["events.jsonl"].touch()
        write_text(paths["request.json"], self.request.model_dump_json(indent=2))
        environment = STAGES[self.stage].environment
        command = [
            str(python_of(environment)), "-m", "aerie", "stage", self.stage, "--request", str(paths["request.json"]),
            "--result", str(paths["result.json"]), "--events", str(paths["events.jsonl"]),
        ]  # fmt: skip
        with paths["output.log"].open("wb") as output, paths["events.jsonl"].open(encoding="utf-8") as events:
            self._process = subprocess.Popen(
                command, env=variables_of(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                preexec_fn=die_with_parent,
            )  # fmt: skip
            try:
                message = self._follow(self._process, events)
            finally:
                self.stop()
        status = self._process.returncode
        if status == 0:
            return StageResult.model_validate_json(paths["result.json"].read_bytes())
        raise self._error(status, message, paths["output.log"])

    def stop(self) -> None:
        """End the stage's process: SIGTERM, then SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _follow(self, process: subprocess.Popen[bytes], events: Any) -> str | None:
        """Forward events until the process ends; return the message of its error event, if any."""
        message: str | None = None
        rest = ""
        parent = os.getppid()
        while True:
            ended = process.poll() is not None
            rest += events.read()
            *lines, rest = rest.split("\n")
            for event in _parsed(lines):
                if event["type"] == "error":
                    message = str(event["message"])
                else:
                    self.on_event(event)
            if ended:
                return message
            if os.getppid() != parent:
                raise Retryable(f"process {parent}, which ran stage {self.stage}, has died: the stage is ended with it")
            time.sleep(POLL_SECONDS)

    def _error(self, status: int, message: str | None, log: Path) -> AerieError:
        if status < 0:
            return Retryable(f"stage {self.stage} was ended by {signal.Signals(-status).name}; its output is in {log}")
        text = message or f"stage {self.stage} ended with status {status}: {_last_line(log)} (its output is in {log})"
        return ERRORS.get(status, Failed)(masked(text))


def _parsed(lines: list[str]) -> Iterator[Event]:
    for line in lines:
        if line.strip():
            yield json.loads(line)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
