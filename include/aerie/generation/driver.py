"""The loop that keeps a server busy and the ledger true.

One task a request, one consumer. Messages arrive in a queue: answers, failures, commits that are done, reasons to
stop. Rows that arrive while a batch is being committed make up the next batch, so batches grow with the load by
themselves. A batch is appended to the response log, synced, and only then committed to the ledger, in a thread; a row
counts when that is done.
"""

import asyncio
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from aerie.artefacts.response_log import Response, ResponseLog
from aerie.errors import Retryable
from aerie.generation.admission import Admission
from aerie.generation.client import TRANSIENT, Answer, GenerateClient, GenerateRequest, RequestFailed
from aerie.generation.population import Population, Stop
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.reconciliation import JUDGED, Judge, judged_row
from aerie.generation.states import StateKeeper, request_id
from aerie.store.queries.ledger import LedgerRow

# Answers that wait for the disk: beyond this many, no request starts.
MOST_UNCOMMITTED = 1024


@dataclass(frozen=True)
class Arrived:
    """A request was answered."""

    prompt: GenerationPrompt
    answer: Answer


@dataclass(frozen=True)
class NotArrived:
    """A request failed for good."""

    prompt: GenerationPrompt
    error: RequestFailed


@dataclass(frozen=True)
class Committed:
    """A batch is durable."""

    rows: tuple[LedgerRow, ...]


@dataclass(frozen=True)
class Ended:
    """The run cannot go on."""

    error: BaseException


Message = Arrived | NotArrived | Committed | Ended


@dataclass(frozen=True)
class Running:
    """A request in flight, and the ledger's row that it started from."""

    prompt: GenerationPrompt
    row: LedgerRow
    task: "asyncio.Task[None]"


class Driver:
    """Generates what a population still lacks.

    ``write_ledger`` commits rows in one transaction. ``rid_prefix`` makes request ids unique on the server.
    ``canary_finished`` is called when the last row of the canary is durable. ``states`` is given every sample that is
    kept, once it is durable.
    """

    def __init__(
        self,
        population: Population,
        *,
        client: GenerateClient,
        log: ResponseLog,
        write_ledger: Callable[[tuple[LedgerRow, ...]], None],
        judge: Judge,
        concurrency: int,
        launch_token: str,
        rid_prefix: str,
        canary_finished: Callable[[], None] = lambda: None,
        states: StateKeeper | None = None,
    ) -> None:
        self._population = population
        self._client = client
        self._log = log
        self._write_ledger = write_ledger
        self._judge = judge
        self._concurrency = concurrency
        self._launch_token = launch_token
        self._rid_prefix = rid_prefix
        self._canary_finished = canary_finished
        self._states = states
        self._kept: dict[str, tuple[GenerationPrompt, Response]] = {}  # until they are durable
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._pending = deque(population.pending())
        self._running: dict[str, Running] = {}
        self._dirty: dict[str, LedgerRow] = {}
        self._commit: asyncio.Task[None] | None = None
        cap = max((prompt.max_new_tokens for prompt in population.eligible), default=1)
        earlier = (row.completion_tokens or 0 for row in population.rows.values() if row.state in JUDGED)
        self._admission = Admission(population.limits, population.counts, cap=cap, earlier=earlier)
        self._canary = frozenset(prompt.sample_id for prompt in population.canary)
        self._canary_passed = False
        self._stop: Stop | None = None

    @property
    def in_flight(self) -> int:
        """Requests that the server is working on."""
        return len(self._running)

    def end(self, error: BaseException) -> None:
        """Stop at once: cancel what is in flight, commit what has arrived, and raise ``error`` from ``run``."""
        self._messages.put_nowait(Ended(error))

    async def run(self) -> Stop:
        """Generate until a limit is reached, the prompts are exhausted, or something is wrong; returns which.

        Raises:
            Retryable: the server, the disk or the database is gone, or ``end`` was called. What arrived is durable.
        """
        try:
            with self._ended_by(signal.SIGTERM):
                return await self._drive()
        except Retryable:
            # Samples that failed while the server was dying were not at fault.
            self._try_again(row for row in self._population.failed_lately() if row.reasons[0] in _TRANSIENT_REASONS)
            raise
        finally:
            await self._settle()

    async def _drive(self) -> Stop:
        while True:
            self._admit()
            self._start_commit()
            if not self._running and self._commit is None and self._messages.empty():
                stop = self._stop or self._population.conclude()
                self._halt(stop)
                return stop
            self._take(await self._messages.get())
            while not self._messages.empty():
                self._take(self._messages.get_nowait())

    @contextmanager
    def _ended_by(self, number: signal.Signals) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        stopped = Retryable(f"stopped by {number.name}; what had arrived is kept, run generate again to go on")
        loop.add_signal_handler(number, self.end, stopped)
        try:
            yield
        finally:
            loop.remove_signal_handler(number)

    # Admission

    def _admit(self) -> None:
        while self._stop is None and self._next_may_start():
            self._start(self._pending.popleft())

    def _next_may_start(self) -> bool:
        if not self._pending or len(self._running) >= self._concurrency or self._log.waiting >= MOST_UNCOMMITTED:
            return False
        owed = self._pending[0].sample_id in self._population.owed
        return self._canary_allows() and self._admission.may_start(time.monotonic(), owed=owed)

    def _canary_allows(self) -> bool:
        """The canary's prompts lead the queue; the others wait until all of them are durable, and pass."""
        if self._canary_passed or self._pending[0].sample_id in self._canary:
            return True
        rows = self._population.rows
        if any(rows[sample_id].state not in (*JUDGED, "failed") for sample_id in self._canary):
            return False
        trouble = self._population.canary_trouble()
        if trouble is not None:
            self._halt(trouble)
        self._canary_passed = trouble is None
        return self._canary_passed

    def _start(self, prompt: GenerationPrompt) -> None:
        row = self._population.rows[prompt.sample_id]
        rid = f"{self._rid_prefix}:{prompt.sample_id}"
        request = GenerateRequest(
            rid=rid if self._states is None else request_id(prompt.sample_id, rid),
            input_ids=prompt.prompt_ids,
            max_new_tokens=prompt.max_new_tokens,
            first_attempt=row.attempts + 1,
            own_cache=self._states is not None,
        )
        task = asyncio.create_task(self._request(prompt, request))
        task.add_done_callback(self._surface)
        sent = replace(row, state="in_flight", attempts=row.attempts + 1)
        self._running[prompt.sample_id] = Running(prompt, row, task)
        self._admission.started(
            prompt.sample_id,
            prompt_tokens=len(prompt.prompt_ids),
            max_new_tokens=prompt.max_new_tokens,
            at=time.monotonic(),
        )
        self._dirty[prompt.sample_id] = sent

    async def _request(self, prompt: GenerationPrompt, request: GenerateRequest) -> None:
        try:
            self._messages.put_nowait(Arrived(prompt, await self._client.generate(request)))
        except RequestFailed as error:
            self._messages.put_nowait(NotArrived(prompt, error))

    def _surface(self, task: "asyncio.Task[None]") -> None:
        """A task's own error ends the run; nothing waits for a message that will not come."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(error)

    # Arrival

    def _take(self, message: Message) -> None:
        match message:
            case Arrived(prompt, answer):
                self._take_answer(prompt, answer)
            case NotArrived(prompt, error):
                self._take_failure(prompt, error)
            case Committed(rows):
                self._take_commit(rows)
            case Ended(error):
                raise error

    def _take_answer(self, prompt: GenerationPrompt, answer: Answer) -> None:
        running = self._running.pop(prompt.sample_id, None)
        if running is None:  # cancelled meanwhile
            return
        response = self._response(prompt, answer)
        verdict = self._judge(prompt, response)
        row = judged_row(
            prompt,
            response,
            verdict,
            crc32=self._log.append(response),
            generated_tokens=running.row.generated_tokens + response.completion_tokens,
        )
        self._admission.arrived(
            prompt.sample_id, response_tokens=response.completion_tokens, kept=verdict.kept, at=time.monotonic()
        )
        if self._states is not None and verdict.kept:
            self._kept[prompt.sample_id] = (prompt, response)
        self._came_out(row)

    def _response(self, prompt: GenerationPrompt, answer: Answer) -> Response:
        meta = answer.reply.meta_info
        # Every field was validated as the reply arrived: another look at a thousand ids costs as much as the first.
        return Response.model_construct(
            sample_id=prompt.sample_id,
            attempt=answer.attempt,
            prompt_sha256=prompt.prompt_sha256,
            prompt_tokens=meta.prompt_tokens,
            completion_tokens=meta.completion_tokens,
            max_new_tokens=prompt.max_new_tokens,
            finish_reason=meta.finish_reason.model_dump(exclude_unset=True),
            launch_token=self._launch_token,
            meta_info=meta.model_dump(exclude_unset=True),
            output_ids=tuple(answer.reply.output_ids),
        )

    def _take_failure(self, prompt: GenerationPrompt, error: RequestFailed) -> None:
        running = self._running.pop(prompt.sample_id, None)
        if running is None:
            return
        self._admission.ended(prompt.sample_id)
        self._came_out(
            replace(
                running.row,
                state="failed",
                attempts=running.row.attempts + error.attempts,
                reasons=(_reason(error.kind),),
                detail=str(error),
            )
        )

    def _came_out(self, row: LedgerRow) -> None:
        self._dirty[row.sample_id] = row
        self._population.observe(row)
        trouble = self._population.trouble()
        if trouble is not None and self._stop is None:
            self._halt(trouble)

    # Durability

    def _start_commit(self) -> None:
        if self._commit is None and self._dirty:
            rows = tuple(self._dirty.values())
            self._dirty.clear()
            self._commit = asyncio.create_task(self._commit_batch(self._log.take(), rows))
            self._commit.add_done_callback(self._surface)

    async def _commit_batch(self, lines: list[bytes], rows: tuple[LedgerRow, ...]) -> None:
        await asyncio.to_thread(self._make_durable, lines, rows)
        self._messages.put_nowait(Committed(rows))

    def _make_durable(self, lines: list[bytes], rows: tuple[LedgerRow, ...]) -> None:
        self._log.write(lines)
        self._write_ledger(rows)

    def _take_commit(self, rows: tuple[LedgerRow, ...]) -> None:
        self._commit = None
        finished_before = self._population.canary_finished
        for row in rows:
            self._population.record(row)
            if self._states is not None and row.state == "kept":
                self._states.keep(*self._kept.pop(row.sample_id))
        if self._population.canary_finished and not finished_before:
            self._canary_finished()

    # Ending

    def _halt(self, stop: Stop) -> None:
        """Take note of why it stops; where something is wrong, what is in flight is not waited for."""
        self._stop = stop
        if stop.failed:
            # Tasks that are done have an answer in the queue, which is still taken.
            self._cancel([sample_id for sample_id, running in self._running.items() if not running.task.done()])
        if stop.reason == "errors":
            self._try_again(self._population.failed_lately())

    def _cancel(self, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids:
            running = self._running.pop(sample_id)
            running.task.cancel()
            self._dirty[sample_id] = replace(running.row, attempts=running.row.attempts + 1)

    def _try_again(self, failed: Iterable[LedgerRow]) -> None:
        """What stopped the run was not the fault of these: the next run tries them again."""
        for row in failed:
            self._dirty[row.sample_id] = replace(row, state="pending", reasons=(), detail=None)

    async def _settle(self) -> None:
        """Cancel what is in flight and make durable what has arrived."""
        if self._commit is not None:
            await asyncio.wait([self._commit])
        while not self._messages.empty():
            message = self._messages.get_nowait()
            if isinstance(message, Arrived | Committed):
                self._take(message)
        tasks = [running.task for running in self._running.values()]
        self._cancel(list(self._running))
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._dirty:
            rows = tuple(self._dirty.values())
            await asyncio.to_thread(self._make_durable, self._log.take(), rows)
            for row in rows:
                self._population.record(row)


def _reason(kind: str) -> str:
    """The ledger's reason for a sample whose requests failed."""
    return f"request_{kind}"


_TRANSIENT_REASONS = frozenset(_reason(kind) for kind in TRANSIENT)
