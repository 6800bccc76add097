"""SGLang's native endpoint: token ids in, token ids out, every reply checked.

A missing field is an error that names it, never a zero. What can go wrong is told apart by ``RequestFailed.kind``;
only what may pass by itself is sent again.

Decided here: whether a reply can be read, is of this very request and of this very prompt. Whether its tokens are
right (as many as counted, inside the vocabulary, ended as the finish reason says) is decided by ``aerie.boundary``,
which quarantines the row: what the server did is then on record. What neither can see is a token id that was changed
on its way into another ordinary one: TCP's checksum, or TLS, is what guards against that.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from yarl import URL

from aerie.errors import Retryable

FailureKind = Literal[
    "poisoned", "aborted", "server_error", "timeout", "connection", "malformed_json", "schema", "inconsistent"
]
TRANSIENT: frozenset[FailureKind] = frozenset({"aborted", "server_error", "timeout", "connection", "malformed_json"})

CONNECT_SECONDS = 5.0
# Below the 5 s after which uvicorn closes an idle connection: reusing one that is being closed is a reset.
KEEPALIVE_SECONDS = 3.0
GONE_AFTER_SECONDS = 4.0  # of refused connections, or of open ones on which nothing at all is answered
SILENT_AFTER_SECONDS = 30.0  # of a scheduler that is not heard of: a long prefill is slow, not dead
ANSWER_SECONDS = 2.5
HEALTH_SECONDS = 5.0
PROBE_INTERVAL_SECONDS = 1.0
ASK_SECONDS = 30.0
LONGEST_BACKOFF_SECONDS = 30.0
QUOTED_CHARACTERS = 300
LONGEST_MESSAGE_CHARACTERS = 1000
FIRST_PRIORITY = 1  # those who name none have the least
LARGEST_COUNT = 2**31 - 1  # of tokens: the ledger's integers

JSON = {"Content-Type": "application/json"}
HTTP_OK = 200
REQUEST_TIMEOUT = 408
TOO_MANY_REQUESTS = 429


class ServerGone(Retryable):
    """The server no longer answers; the stage is worth retrying with another one."""


class Refused(ServerGone):
    """The server answers, but not what was asked."""


class RequestFailed(Exception):
    """One request came to nothing. ``attempts`` counts how often it was sent, once that is known.

    The message is one line that a database and a log take, whatever the server said.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(_printable(message))
        self.kind = kind
        self.attempts = 1

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed when it is sent again."""
        return self.kind in TRANSIENT


class FinishReason(BaseModel):
    """Why the server stopped, as SGLang says it."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None


Described = TypeVar("Described", bound=BaseModel)
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT, strict=True)]


class MetaInfo(BaseModel):
    """What the server says of a response; fields that nothing here reads are kept as they are. ``id`` is the rid."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    finish_reason: FinishReason
    prompt_tokens: Count
    completion_tokens: Count


class Reply(BaseModel):
    """A reply of ``/generate``; ``output_ids`` are token ids [completion_tokens]."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    output_ids: list[Annotated[int, Field(strict=True)]]
    meta_info: MetaInfo


class ServerInfo(BaseModel):
    """What the server says of itself at ``/server_info``, as far as generation depends on it."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_path: str
    revision: str | None
    dtype: str
    kv_cache_dtype: str
    reasoning_parser: str | None
    tool_call_parser: str | None
    speculative_algorithm: str | None
    max_total_num_tokens: int
    version: str


@dataclass(frozen=True)
class GenerateRequest:
    """One sample to be generated. ``rid`` is the request id without the attempt.

    With ``own_cache`` it shares no prefix with other requests, so that all of it is computed for it.
    """

    rid: str
    input_ids: Sequence[int]
    max_new_tokens: int
    first_attempt: int = 1
    own_cache: bool = False


@dataclass(frozen=True)
class _Problem:
    """What a probe met, and for how long that may last before the server counts as gone."""

    what: str
    patience_seconds: float


@dataclass(frozen=True)
class Answer:
    """A checked reply, and the attempt that brought it."""

    reply: Reply
    attempt: int


def parse_reply(body: bytes, *, rid: str, prompt_tokens: int) -> Reply:
    """Check a reply to the request ``rid``, whose prompt had ``prompt_tokens``.

    Raises:
        RequestFailed: it is not JSON (``malformed_json``), a field is missing or wrong (``schema``: the message names
            the field and the keys received), the request was aborted (``aborted``, or ``poisoned`` where the server
            blames the request), or it is of another request or prompt (``inconsistent``).
    """
    try:
        reply = Reply.model_validate_json(body)
    except ValidationError as error:
        raise _unreadable(body, error) from error
    finish = reply.meta_info.finish_reason
    if finish.type == "abort":
        blamed = finish.status_code is not None and _blames_request(finish.status_code)
        raise RequestFailed(
            "poisoned" if blamed else "aborted",
            f"aborted inside a 200: {finish.message or 'no message'} (status_code {finish.status_code})",
        )
    if reply.meta_info.id != rid:
        raise RequestFailed("inconsistent", f"meta_info.id is {reply.meta_info.id}, but the request was {rid}")
    if reply.meta_info.prompt_tokens != prompt_tokens:
        raise RequestFailed(
            "inconsistent",
            f"meta_info.prompt_tokens is {reply.meta_info.prompt_tokens}, but {prompt_tokens} ids were sent",
        )
    return reply


def _blames_request(status: int) -> bool:
    return 400 <= status < 500 and status not in (REQUEST_TIMEOUT, TOO_MANY_REQUESTS)


def _unreadable(body: bytes, error: ValidationError) -> RequestFailed:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return RequestFailed("malformed_json", f"{first['msg']} in a body of {len(body)} bytes")
    field = ".".join(map(str, first["loc"])) or "(top)"
    return RequestFailed("schema", f"field {field}: {first['msg'].lower()}; keys received: {_keys(from_json(body))}")


def _keys(document: Any) -> str:
    if not isinstance(document, dict):
        return f"none, the reply is a {type(document).__name__}"
    inside = document.get("meta_info")
    nested = f"; in meta_info: {', '.join(map(str, inside))}" if isinstance(inside, dict) else ""
    return ", ".join(map(str, document)) + nested


def _printable(text: str) -> str:
    """``text`` on one line of bounded length, without what PostgreSQL refuses: NUL and lone surrogates."""
    line = " ".join(text.replace("\0", "\N{REPLACEMENT CHARACTER}").split()).encode(errors="replace").decode()
    return line if len(line) <= LONGEST_MESSAGE_CHARACTERS else line[:LONGEST_MESSAGE_CHARACTERS] + "..."


def _quoted(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return text[:QUOTED_CHARACTERS] + ("..." if len(text) > QUOTED_CHARACTERS else "")


class GenerateClient:
    """Client of one server, for use inside one event loop.

    ``maximum_attempts`` is how often one request is sent; ``first_backoff_seconds`` bounds the first, random, pause.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        sampling: Mapping[str, Any],
        request_timeout_seconds: float,
        maximum_attempts: int,
        first_backoff_seconds: float,
    ) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._generate_url = URL(f"{self._url}/generate")
        self._sampling = sampling
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_seconds, sock_connect=CONNECT_SECONDS)
        self._maximum_attempts = maximum_attempts
        self._first_backoff_seconds = first_backoff_seconds
        self._probing = asyncio.Lock()
        self._alive_at = 0.0

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, concurrency: int, **options: Any) -> AsyncIterator[Self]:
        """A client with its own session, that may have ``concurrency`` requests open; ``options`` as for the class."""
        connector = aiohttp.TCPConnector(limit=concurrency + 4, keepalive_timeout=KEEPALIVE_SECONDS)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield cls(session, url, **options)

    async def generate(self, request: GenerateRequest) -> Answer:
        """Send a request, again where its failure is transient, and return the checked answer.

        Raises:
            RequestFailed: it failed for good, or as often as it may.
            ServerGone: the server no longer answers.
        """
        try:
            return Answer(await self._send(request, request.first_attempt), request.first_attempt)
        except RequestFailed as error:
            return await self._send_again(request, error)

    async def _send_again(self, request: GenerateRequest, first: RequestFailed) -> Answer:
        """What follows a first failure. Machinery for it costs about as much as a request: few pay for it."""
        attempt = request.first_attempt
        try:
            async for attempting in AsyncRetrying(
                stop=stop_after_attempt(self._maximum_attempts),
                wait=wait_random_exponential(multiplier=self._first_backoff_seconds, max=LONGEST_BACKOFF_SECONDS),
                retry=retry_if_exception(lambda error: isinstance(error, RequestFailed) and error.transient),
                reraise=True,
            ):
                with attempting:
                    if attempting.retry_state.attempt_number == 1:
                        raise first
                    attempt += 1
                    return Answer(await self._send(request, attempt), attempt)
        except RequestFailed as error:
            error.attempts = attempt - request.first_attempt + 1
            raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _send(self, request: GenerateRequest, attempt: int) -> Reply:
        rid = f"{request.rid}:{attempt}"
        body = {
            "rid": rid,
            "input_ids": list(request.input_ids),
            "sampling_params": {**self._sampling, "max_new_tokens": request.max_new_tokens},
            "stream": False,
            **({"extra_key": rid} if request.own_cache else {}),
        }
        return parse_reply(await self._post(body), rid=rid, prompt_tokens=len(request.input_ids))

    async def finish(self, rid: str, input_ids: Sequence[int], *, own_cache: str) -> None:
        """Have the server compute what it lacks of a whole sample, ahead of all that waits; sent once.

        ``own_cache`` is the id of the request, with its attempt, that generated the sample.

        Raises:
            RequestFailed: it failed.
            ServerGone: the server no longer answers.
        """
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},  # a server samples one token at least
            "stream": False,
            "extra_key": own_cache,
            "priority": FIRST_PRIORITY,
        }
        parse_reply(await self._post(body), rid=rid, prompt_tokens=len(input_ids))

    async def _post(self, body: Mapping[str, Any]) -> bytes:
        try:
            async with self._session.post(
                self._generate_url, data=to_json(body), headers=JSON, timeout=self._timeout, allow_redirects=False
            ) as response:
                status, reply = response.status, await response.read()
        except TimeoutError as error:
            await self.confirm_alive()
            raise RequestFailed("timeout", f"no answer within {self._timeout.total:.0f} s") from error
        except aiohttp.ClientError as error:
            await self.confirm_alive()
            raise RequestFailed("connection", f"{type(error).__name__}: {error}") from error
        if status != HTTP_OK:
            kind: FailureKind = "poisoned" if _blames_request(status) else "server_error"
            raise RequestFailed(kind, f"HTTP {status}: {_quoted(reply)}")
        self._alive_at = time.monotonic()
        return reply

    async def confirm_alive(self) -> None:
        """Return when the server is alive; callers that come together share one probe.

        A generated answer that came meanwhile tells as well: where this process is the one that is slow, the probe's
        own answer may wait behind many of them.

        Raises:
            ServerGone: it has answered nothing for some seconds, or its scheduler was not heard of for longer.
        """
        asked_at = time.monotonic()
        async with self._probing:
            while self._alive_at <= asked_at:
                problem = await self._probe()
                if problem is None:
                    self._alive_at = time.monotonic()
                elif time.monotonic() - asked_at < problem.patience_seconds:
                    await asyncio.sleep(PROBE_INTERVAL_SECONDS)
                elif self._alive_at <= asked_at:
                    raise ServerGone(
                        f"the server at {self._url} is gone: {problem.what}; ensure the server and run generate again"
                    )

    async def _probe(self) -> _Problem | None:
        """What is wrong with the server, or None when it is alive.

        ``/model_info`` is answered by the HTTP process alone, at once: any answer tells that it lives. ``/health``
        tells of the scheduler behind it, which may be slow.
        """
        try:
            await self._status_of("/model_info", ANSWER_SECONDS)
        except TimeoutError:
            return _Problem(f"it answers nothing within {ANSWER_SECONDS} s", GONE_AFTER_SECONDS)
        except aiohttp.ClientError as error:
            return _Problem(f"{type(error).__name__}: {error}", GONE_AFTER_SECONDS)
        try:
            status = await self._status_of("/health", HEALTH_SECONDS)
        except TimeoutError:
            return _Problem(f"/health does not answer within {HEALTH_SECONDS:.0f} s", SILENT_AFTER_SECONDS)
        except aiohttp.ClientError as error:
            return _Problem(f"/health: {type(error).__name__}: {error}", GONE_AFTER_SECONDS)
        return None if status == HTTP_OK else _Problem(f"/health says {status}", SILENT_AFTER_SECONDS)

    async def _status_of(self, path: str, seconds: float) -> int:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.get(f"{self._url}{path}", timeout=timeout) as response:
            return response.status

    async def server_info(self) -> ServerInfo:
        """What the server says of itself; raises as ``ask``."""
        return await self.ask("/server_info", ServerInfo)

    async def ask(self, path: str, expected: type[Described]) -> Described:
        """What the server says of itself at ``path``.

        Raises:
            ServerGone: it does not answer.
            RequestFailed: its answer has another form (``schema``).
        """
        body = await self.read(path)
        try:
            return expected.model_validate_json(body)
        except ValidationError as error:
            raise _unreadable(body, error) from error

    async def read(self, path: str) -> bytes:
        """What the server says at ``path``.

        Raises:
            ServerGone: it does not answer; ``Refused`` where it does, with an error.
        """
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with self._session.get(f"{self._url}{path}", timeout=timeout) as response:
                status, body = response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ServerGone(f"the server at {self._url} does not answer: {type(error).__name__}: {error}") from error
        if status != HTTP_OK:
            raise Refused(f"the server at {self._url} says {status} to {path}: {_quoted(body)}")
        return body
