"""A server's log as it grows: where the start is, whether the server is over, and what it says went wrong."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aerie.serving.explanation import Explanation, explain
from aerie.serving.failures import Doing

LAST_WORDS_LINES = 2000
"""How far back the cause of an end is looked for: a traceback of every rank, when one takes the others along."""

PROGRESS_LINES = 200
"""More lines of progress than any start has: the lease stays small whatever a server logs."""

OVER = re.compile(r"Received sigquit from a child process|SIGQUIT received\.|error while attempting to bind on address")
FAILED = re.compile(r"(?:Scheduler|TpModelWorker|DataParallelController|DetokenizerManager) hit an exception")
"""What SGLang logs when a worker has failed, or its port is taken, and the server will not recover."""

LINE = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: (?P<rank>[A-Z]+\d+(?: [A-Z]+\d+)*))?\] (?P<text>.*)$")
"""A line of SGLang's log: time, rank where there are several, and text."""

STAGE = re.compile(
    r"^(?:Load weight (?:begin|end)|KV Cache is allocated|Post-capture KV sizing: KV cache allocated"
    r"|Memory pool end|Allocating .*host (?:pool|memory)|max_total_num_tokens=|Capture .+ graph (?:begin|end)"
    r"|The server is fired up and ready to roll)"
)
"""Lines that say where a start is, as SGLang 0.5.23 writes them."""

BAR = re.compile(
    r"^(?P<what>[^|(]+?)(?: \((?P<now>[^)]*)\))?:\s+(?P<percent>\d{1,3})%"
    r"(?: Completed \||\|[^|]*\|) (?P<count>\d+/\d+) \["
)
"""A progress bar: ``Loading safetensors checkpoint shards:  25% Completed | 16/64 [...]``, ``Capturing batches (bs=8
avail_mem=5.51 GB):  17%|##   | 4/23 [...]``."""

EFFECTIVE = re.compile(r"\b(?P<name>chunked_prefill_size|max_running_requests)=(?P<value>\d+)")
BATCH = re.compile(r"^(?P<kind>Prefill|Decode) batch, .*#running-req: (?P<running>\d+)")
KINDS: Mapping[str, Doing] = {"Prefill": "Prefill", "Decode": "Decode"}


@dataclass(frozen=True)
class Batch:
    """The last batch that the server logged."""

    kind: Doing
    running_requests: int


class ServerLog:
    """Reader of a server's log as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._last_lines: deque[str] = deque(maxlen=LAST_WORDS_LINES)
        self._tenths: dict[str, int] = {}
        self._failed = False
        self.over = False
        """Whether the server has said that it will not recover, and why."""
        self.progress: list[str] = []
        """Where the start is, line by line: stages, and bars at every tenth."""
        self.effective: dict[str, int] = {}
        """``chunked_prefill_size`` and ``max_running_requests`` as the server resolved them."""
        self.batch: Batch | None = None
        """Its last batch, None before the first."""

    def read(self) -> None:
        """Take in the complete lines written since the last call; a bar's carriage return ends a line too."""
        self.over = self.over or self._failed  # by now the traceback that follows a worker's word is there too
        with self.path.open("rb") as file:
            file.seek(self._offset)
            written = file.read()
        complete = written[: max(written.rfind(b"\n"), written.rfind(b"\r")) + 1]
        self._offset += len(complete)
        for line in re.split(r"[\r\n]+", complete.decode("utf-8", errors="replace")):
            if line.strip():
                self._take(line.rstrip())

    def _take(self, line: str) -> None:
        self._last_lines.append(line)
        self.over = self.over or OVER.search(line) is not None
        self._failed = self._failed or FAILED.search(line) is not None
        entry = LINE.match(line)
        if entry is None:
            self._take_bar(line)
            return
        if not _is_first_rank(entry["rank"]):
            return
        text = entry["text"]
        if batch := BATCH.match(text):
            self.batch = Batch(KINDS[batch["kind"]], int(batch["running"]))
        elif STAGE.match(text):
            self._tell(text)
            self.effective |= {one["name"]: int(one["value"]) for one in EFFECTIVE.finditer(text)}

    def _take_bar(self, line: str) -> None:
        bar = BAR.match(line)
        if bar is None:
            return
        tenth = int(bar["percent"]) // 10
        if tenth > self._tenths.get(bar["what"], 0):
            self._tenths[bar["what"]] = tenth
            now = f", {bar['now']}" if bar["now"] else ""
            self._tell(f"{bar['what']}: {bar['percent']}% ({bar['count']}{now})")

    def _tell(self, text: str) -> None:
        if text not in self.progress and len(self.progress) < PROGRESS_LINES:
            self.progress.append(text)

    def explain(self, status: int | None) -> Explanation:
        """What the log says went wrong, what to do if that is known, and where to read on.

        Args:
            status: the server's exit status as ``subprocess`` gives it, None while it runs.
        """
        doing = None if self.batch is None else self.batch.kind
        return explain(self._last_lines, status=status, doing=doing, path=self.path)


def _is_first_rank(rank: str | None) -> bool:
    """Every rank logs its own memory; one of them is enough to follow a start."""
    return rank is None or all(number == "0" for number in re.findall(r"\d+", rank))
