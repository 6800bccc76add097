"""The trainer as a subprocess: started in the caller's process group, watched line by line, never outliving it."""

import fcntl
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

import aerie
from aerie.errors import Busy, Failed, Retryable
from aerie.processes import descendants_of, die_with_parent, send_signal_to
from aerie.training.trainer_log import Step, parse_step, parse_validation, says_interrupted

# speculators gives up saving its interrupted state after 120 s.
SAVE_SECONDS = 150.0
SIGNAL_HEARD_SECONDS = 3.0
ABORT_SECONDS = 10.0
POLL_SECONDS = 0.2
TAIL_LINES = 30

# Rich wraps at the terminal's width; a step's figures must stay on one line.
CONSOLE_COLUMNS = "1200"
_PADDING = re.compile(r"\s{3,}")

FedSince = Callable[[], float | None]
"""Since when (monotonic seconds) all that the trainer may wait for is there; None while some of it is being made."""


@dataclass
class TrainerReport:
    """What the trainer said: its steps (first and last), the last validation, the tail of its log, its exit code."""

    first_step: Step | None = None
    last_step: Step | None = None
    steps: int = 0
    tokens: float = 0.0
    tail: list[str] = field(default_factory=list)
    exit_code: int | None = None
    interrupted: bool = False
    stalled: bool = False
    progressed_at: float = field(default_factory=time.monotonic)

    def evidence(self) -> str:
        """The end of the trainer's log, for an error message."""
        return "\n".join(self.tail)


@contextmanager
def exclusive(lock: Path) -> Iterator[int]:
    """Hold ``lock``; yield its descriptor, which the trainer inherits, so that the lock lives as long as the trainer.

    Raises:
        Busy: a trainer of an earlier try still runs after the time that it may take to save its state.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + SAVE_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(f"{lock}: another trainer still writes to this folder; wait for it or end it") from None
                time.sleep(POLL_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def run_trainer(
    command: Sequence[str],
    *,
    log: Path,
    lock: int,
    on_step: Callable[[Step], None],
    on_validation: Callable[[dict[str, float]], None],
    stall_seconds: float,
    fed_since: FedSince | None = None,
    gpus: str | None = None,
) -> TrainerReport:
    """Run the trainer to its end, on ``gpus`` alone (``CUDA_VISIBLE_DEVICES``) if given, and return what it said.

    It writes to ``log`` itself, and not through a pipe: one that breaks, because this process was killed, would end it
    before it has saved its state. A SIGTERM to this process is passed on to it.

    After ``stall_seconds`` without a step or a validation it counts as hung: its threads' stacks go to the log, and it
    ends. Where what it trains on is made meanwhile, time counts only from when ``fed_since`` says that it is there.

    Raises:
        Failed: a step says that what it trains on is wrong; the trainer is ended at once. What it saves then has
            learned from the fault: the caller removes it. Or it hangs; the message has the end of its log.
        Retryable: this process was told to end; the trainer has saved its state.
    """
    report = TrainerReport()
    environment = {
        **os.environ,
        "COLUMNS": CONSOLE_COLUMNS,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": _module_path(),
        "PYTHONUNBUFFERED": "1",
    }
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    log.parent.mkdir(parents=True, exist_ok=True)
    with _Termination() as termination, log.open("ab") as output:
        begins_at = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(lock,),
            preexec_fn=die_with_parent,
        )
        try:
            for line in _follow(process, log, begins_at, termination, report, stall_seconds, fed_since):
                report.tail = [*report.tail[1 - TAIL_LINES :], line]
                _take(line, report, on_step, on_validation)
        finally:
            _end(process)
            report.exit_code = process.returncode
    if report.stalled:
        raise Failed(
            f"the trainer made no step for {time.monotonic() - report.progressed_at:,.0f} s (training.stall_minutes) "
            f"and was ended; {log} ends with its threads' stacks:\n{report.evidence()}"
        )
    if termination.asked:
        raise Retryable("training was told to stop; the trainer saved its state and the next try resumes from it")
    return report


def _take(
    line: str, report: TrainerReport, on_step: Callable[[Step], None], on_validation: Callable[[dict[str, float]], None]
) -> None:
    report.interrupted = report.interrupted or says_interrupted(line)
    step = parse_step(line)
    if step is not None:
        if step.fault is not None:
            raise Failed(f"training stopped at {step.fault}")
        report.first_step = report.first_step or step
        report.last_step = step
        report.steps += 1
        report.progressed_at = time.monotonic()
        on_step(step)
    validation = parse_validation(line)
    if validation is not None:
        report.progressed_at = time.monotonic()
        on_validation(validation)


class _Termination:
    """SIGTERM and SIGINT of this process, noted instead of fatal while the trainer runs."""

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        return self.asked_at is not None

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()

    def __enter__(self) -> "_Termination":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _follow(
    process: subprocess.Popen[bytes],
    log: Path,
    begins_at: int,
    termination: _Termination,
    report: TrainerReport,
    stall_seconds: float,
    fed_since: FedSince | None,
) -> Iterator[str]:
    """Lines that the trainer writes to ``log`` until it ends; passes a termination on to it, and ends one that hangs.

    Whoever ends the process group signals the trainer as well, and a second SIGTERM while it saves would kill it:
    it is signalled only when it has not said within a few seconds that it heard.
    """
    signalled = False
    with log.open("rb") as output:
        output.seek(begins_at)
        rest = b""
        while True:
            ended = process.poll() is not None
            *lines, rest = (rest + output.read()).split(b"\n")
            yield from filter(None, map(_clean, [*lines, rest] if ended else lines))
            waited = time.monotonic() - termination.asked_at if termination.asked_at is not None else 0.0
            if ended or waited > SAVE_SECONDS:
                return
            if waited > SIGNAL_HEARD_SECONDS and not (signalled or report.interrupted):
                process.terminate()
                signalled = True
            hangs = _silent_seconds(report, fed_since) > stall_seconds
            if hangs and not (termination.asked or report.stalled):
                report.stalled = True
                _abort(process)
            time.sleep(POLL_SECONDS)


def _silent_seconds(report: TrainerReport, fed_since: FedSince | None) -> float:
    """How long the trainer has made nothing of what it could."""
    since = report.progressed_at
    if fed_since is not None:
        fed = fed_since()
        if fed is None:
            return 0.0
        since = max(since, fed)
    return time.monotonic() - since


def _abort(process: subprocess.Popen[bytes]) -> None:
    """End the trainer with all its processes, each of which writes its threads' stacks first (faulthandler)."""
    trainer = psutil.Process(process.pid)
    workers = descendants_of(trainer)
    for one in (*workers, trainer):
        send_signal_to(one, signal.SIGABRT)
    _, left = psutil.wait_procs(workers, timeout=ABORT_SECONDS)
    for one in left:  # nobody else would end what is left under torchrun
        send_signal_to(one, signal.SIGKILL)
    try:
        process.wait(timeout=ABORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _clean(line: bytes) -> str:
    """A line as it stands in the end: a progress bar redraws it, and rich pads it to the console's width."""
    return _PADDING.sub("  ", line.decode(errors="replace").rpartition("\r")[2]).strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the trainer if it still runs, first politely, and reap it."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=SAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _module_path() -> str:
    """PYTHONPATH on which the trainer finds this package."""
    here = str(Path(aerie.__file__).parents[1])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
