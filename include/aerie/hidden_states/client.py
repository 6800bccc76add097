"""Sending the corpus through a capturing server, and checking each state file as it appears."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import tenacity

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import state_name
from aerie.errors import AerieError, Failed, Retryable
from aerie.hidden_states.protocol import CapturedRequest, failure_path, hook_failure_path, why_not_written
from aerie.hidden_states.record import CaptureRecord

ATTEMPTS = 3
FILE_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class CaptureTarget:
    """The server that captures: its URL, how many requests it is sent at once, and how long one may take."""

    url: str
    concurrency: int
    request_timeout_seconds: float


class Capture:
    """One capture of corpus rows through a server whose hooks write into the record's folder."""

    def __init__(self, target: CaptureTarget, record: CaptureRecord, renew: Callable[[], None]) -> None:
        self._target = target
        self._record = record
        self._renew = renew

    def run(self, rows: Iterator[CorpusRow]) -> None:
        """Capture ``rows``, skipping those whose state file is there and good; the lease is renewed all the while.

        Raises:
            Failed: the hook cannot capture, or a captured file is wrong.
            Retryable: the server stopped answering.
        """
        hook_failure_path(self._record.states).unlink(missing_ok=True)
        try:
            asyncio.run(self._run(rows))
        except ExceptionGroup as group:
            known = [error for error in group.exceptions if isinstance(error, AerieError)]
            if not known:
                raise
            raise known[0] from None

    async def _run(self, rows: Iterator[CorpusRow]) -> None:
        timeout = aiohttp.ClientTimeout(total=self._target.request_timeout_seconds)
        connector = aiohttp.TCPConnector(limit=self._target.concurrency)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
            reporter = group.create_task(self._report())
            workers = [group.create_task(self._work(session, rows)) for _ in range(self._target.concurrency)]
            await asyncio.wait(workers)
            reporter.cancel()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._record.report_seconds)
            await asyncio.to_thread(self._renew)
            await asyncio.to_thread(self._record.report)

    async def _work(self, session: aiohttp.ClientSession, rows: Iterator[CorpusRow]) -> None:
        for row in rows:
            if not await asyncio.to_thread(self._record.present, row):
                await self._capture(session, row)

    async def _capture(self, session: aiohttp.ClientSession, row: CorpusRow) -> None:
        request = CapturedRequest(name=state_name(row.sample_id), tokens=len(row.input_ids))
        failure_path(self._record.states, request.name).unlink(missing_ok=True)
        await self._prefill(session, row, request)
        reason = await why_not_written(self._record.states, request.name, seconds=FILE_TIMEOUT_SECONDS)
        if reason is not None:
            raise Failed(f"{self._record.path_of(row).name}: {reason}")
        await asyncio.to_thread(self._record.accept, row)

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(Retryable),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential(min=1, max=30),
        reraise=True,
    )
    async def _prefill(self, session: aiohttp.ClientSession, row: CorpusRow, request: CapturedRequest) -> None:
        body = {
            "input_ids": row.input_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "rid": request.request_id,
        }
        try:
            async with session.post(f"{self._target.url}/generate", json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Retryable(f"{self._target.url}: no answer while capturing sample {row.sample_id}: {error}") from error
        if response.status >= 500:
            raise Retryable(f"{self._target.url}: status {response.status} for sample {row.sample_id}: {text[:500]}")
        if response.status != 200:
            raise Failed(f"{self._target.url}: status {response.status} for sample {row.sample_id}: {text[:500]}")
        _check_answer(json.loads(text), row)


def _check_answer(answer: dict[str, Any], row: CorpusRow) -> None:
    try:
        about = answer["meta_info"]
        reason, prefilled, cached = about["finish_reason"], about["prompt_tokens"], about["cached_tokens"]
    except KeyError as error:
        raise Failed(
            f"sample {row.sample_id}: the server's answer has no {error.args[0]}, which SGLang always sends: it is "
            "another server, or another version than the one in requirements"
        ) from error
    if reason["type"] == "abort":
        raise Retryable(f"the server aborted sample {row.sample_id}: {reason}")
    if prefilled != len(row.input_ids) or cached != 0:
        raise Failed(
            f"sample {row.sample_id}: the server prefilled {prefilled} tokens, {cached} of them from its cache; "
            f"expected {len(row.input_ids)} and 0: launch it with --disable-radix-cache"
        )
