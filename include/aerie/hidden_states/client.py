"""Sending the corpus through a capturing server, and checking each state file as it appears."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import tenacity

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import state_name, state_path
from aerie.errors import AerieError, Failed, Retryable
from aerie.hidden_states.check import CheckedState, check_state_file
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.protocol import CapturedRequest, failure_path, hook_failure_path

ATTEMPTS = 3
FILE_TIMEOUT_SECONDS = 120.0
FILE_POLL_SECONDS = 0.02


@dataclass
class CaptureProgress:
    """What a capture has done so far."""

    captured_rows: int = 0
    captured_tokens: int = 0
    present_rows: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class CaptureTarget:
    """Where states are captured: the server's URL and launch, the folder that its hook writes into, and the shape."""

    url: str
    states: Path
    layers: CapturedLayers
    concurrency: int
    request_timeout_seconds: float


class Capture:
    """One capture of corpus rows; ``done`` is called with each row's checked state file."""

    def __init__(self, target: CaptureTarget, done: Callable[[CorpusRow, CheckedState], None]) -> None:
        self._target = target
        self._done = done
        self.progress = CaptureProgress()

    def run(self, rows: Iterator[CorpusRow], report: Callable[[CaptureProgress], None], every_seconds: float) -> None:
        """Capture ``rows``, skipping those whose state file is there and good.

        Raises:
            Failed: the hook cannot capture, or a captured file is wrong.
            Retryable: the server stopped answering.
        """
        hook_failure_path(self._target.states).unlink(missing_ok=True)
        try:
            asyncio.run(self._run(rows, report, every_seconds))
        except ExceptionGroup as group:
            known = [error for error in group.exceptions if isinstance(error, AerieError)]
            if not known:
                raise
            raise known[0] from None

    async def _run(
        self, rows: Iterator[CorpusRow], report: Callable[[CaptureProgress], None], every_seconds: float
    ) -> None:
        timeout = aiohttp.ClientTimeout(total=self._target.request_timeout_seconds)
        connector = aiohttp.TCPConnector(limit=self._target.concurrency)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
            reporter = group.create_task(self._report(report, every_seconds))
            workers = [group.create_task(self._work(session, rows)) for _ in range(self._target.concurrency)]
            await asyncio.wait(workers)
            reporter.cancel()
        report(self.progress)

    async def _report(self, report: Callable[[CaptureProgress], None], every_seconds: float) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            await asyncio.to_thread(report, self.progress)

    async def _work(self, session: aiohttp.ClientSession, rows: Iterator[CorpusRow]) -> None:
        for row in rows:
            path = state_path(self._target.states, state_name(row.sample_id))
            present = await asyncio.to_thread(self._present, path, row)
            if present is None:
                present = await self._capture(session, row, path)
                self.progress.captured_rows += 1
                self.progress.captured_tokens += present.tokens
            else:
                self.progress.present_rows += 1
            self.progress.bytes += present.bytes
            self._done(row, present)

    def _present(self, path: Path, row: CorpusRow) -> CheckedState | None:
        """The state file as an earlier run left it; one that is not good is removed."""
        if not path.exists():
            return None
        try:
            return check_state_file(path, row.input_ids, self._target.layers)
        except Failed:
            path.unlink()
            return None

    async def _capture(self, session: aiohttp.ClientSession, row: CorpusRow, path: Path) -> CheckedState:
        request = CapturedRequest(name=state_name(row.sample_id), tokens=len(row.input_ids))
        failure = failure_path(self._target.states, request.name)
        failure.unlink(missing_ok=True)
        await self._prefill(session, row, request)
        await self._wait(path, failure)
        return await asyncio.to_thread(check_state_file, path, row.input_ids, self._target.layers)

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

    async def _wait(self, path: Path, failure: Path) -> None:
        deadline = time.monotonic() + FILE_TIMEOUT_SECONDS
        hook_failure = hook_failure_path(self._target.states)
        while not path.exists():
            for reported in (failure, hook_failure):
                if reported.exists():
                    reason = json.loads(reported.read_text(encoding="utf-8"))["reason"]
                    raise Failed(f"{path.name}: the hook inside the server could not capture it: {reason}")
            if time.monotonic() > deadline:
                raise Failed(
                    f"{path.name}: prefilled, but not written {FILE_TIMEOUT_SECONDS:.0f} s later: the server was not "
                    "launched with Aerie's forward hooks, writes to another folder, or the hooked modules have other "
                    "names (profile: module_prefix); see the server's log for 'No modules matched hook spec'"
                )
            await asyncio.sleep(FILE_POLL_SECONDS)


def _check_answer(answer: dict[str, Any], row: CorpusRow) -> None:
    about = answer["meta_info"]
    if about["finish_reason"]["type"] == "abort":
        raise Retryable(f"the server aborted sample {row.sample_id}: {about['finish_reason']}")
    if about["prompt_tokens"] != len(row.input_ids) or about.get("cached_tokens", 0) != 0:
        raise Failed(
            f"sample {row.sample_id}: the server prefilled {about['prompt_tokens']} tokens, "
            f"{about.get('cached_tokens')} of them from its cache; expected {len(row.input_ids)} and 0: launch it with "
            "--disable-radix-cache"
        )
