"""Why a server ended, from its last words: the known failure that they tell, or the last exception."""

import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aerie.errors import AerieError
from aerie.serving.errors import LaunchFailed
from aerie.serving.failures import KILLED, KNOWN, Doing, KnownFailure

SAID_CHARACTERS = 400
"""PyTorch's word on running out of memory fits; a list of all architectures does not."""

LOGGED = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ?")
TRACEBACK = re.compile(r"Traceback \(most recent call last\):$")
EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b")
CHAIN = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
HARMLESS = re.compile(
    r"^\$ |\bserver_args=|Ignore import error|UserWarning|^\s+warnings\.warn|OpenAI Responses API .* disabled"
)
"""Lines that quote what would be a failure elsewhere: the command, all settings, what is optional."""
FOLLOWS = re.compile(r"scheduler died during initialization \(exit code: (?!-)|see the error messages above")
"""What the parent says of a child's exception, which tells more."""


@dataclass(frozen=True)
class Message:
    """One message of a log: a line, or an exception with the frames of its traceback."""

    text: str
    frames: str = ""

    @property
    def first_line(self) -> str:
        """What a person is told of it."""
        line = LOGGED.sub("", self.text.partition("\n")[0]).strip()
        return line if len(line) <= SAID_CHARACTERS else f"{line[:SAID_CHARACTERS]} ..."

    def tells(self, known: KnownFailure, doing: Doing | None) -> bool:
        """Whether this is the known failure, of a server whose last batch was of the given kind."""
        if known.doing is not None and known.doing != doing:
            return False
        if known.frames is not None and re.search(known.frames, self.frames, re.M) is None:
            return False
        return re.search(known.pattern, self.text, re.M) is not None


@dataclass(frozen=True)
class Explanation:
    """What a log says went wrong, and what to do about it if that is known."""

    said: str
    known: KnownFailure | None
    path: Path

    @property
    def error(self) -> type[AerieError]:
        """How a launch fails of it."""
        return LaunchFailed if self.known is None else self.known.error

    def __str__(self) -> str:
        advice = "" if self.known is None else f"; {self.known.advice}"
        return f"{self.said}{advice} (log: {self.path})"


def explain(lines: Iterable[str], *, status: int | None, doing: Doing | None, path: Path) -> Explanation:
    """What a server's last lines say went wrong.

    Args:
        lines: its last lines, with their indentation.
        status: its exit status as ``subprocess`` gives it, None while it runs.
        doing: its last batch, None before the first.
        path: the log.
    """
    messages = tuple(_messages([line for line in lines if HARMLESS.search(line) is None]))
    for known in KNOWN:
        fitting = next((message for message in messages if message.tells(known, doing)), None)
        if fitting is not None:
            return Explanation(fitting.first_line, known, path)
    raised = [one for one in messages if EXCEPTION.match(one.text)]
    telling = [one for one in raised if FOLLOWS.search(one.text) is None]
    if telling or raised:
        return Explanation((telling or raised)[-1].first_line, None, path)
    last = f"its log ends with: {messages[-1].first_line}" if messages else "it logged nothing"
    return Explanation(last, KILLED if status == -signal.SIGKILL else None, path)


def _messages(lines: Sequence[str]) -> Iterator[Message]:
    index = 0
    while index < len(lines):
        if TRACEBACK.search(lines[index]):
            frames_end = _end(lines, index + 1, lambda line: not line.startswith(" "))
            text_end = _end(lines, frames_end + 1, _begins_another)
            frames = "\n".join(line.strip() for line in lines[index:frames_end])
            yield Message("\n".join(lines[frames_end:text_end]), frames)
            index = max(text_end, index + 1)
        else:
            yield Message(lines[index])
            index += 1


def _end(lines: Sequence[str], start: int, reached: Callable[[str], bool]) -> int:
    return next((index for index in range(start, len(lines)) if reached(lines[index])), len(lines))


def _begins_another(line: str) -> bool:
    return any(mark.search(line) for mark in (LOGGED, TRACEBACK, CHAIN))
