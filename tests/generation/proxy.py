"""A TCP proxy that does to a connection what networks do: cut it, delay it, reset it, lose its end, change its bytes.

It runs in a thread of its own. What it does next on a connection is decided by ``fault``, which is given how often it
was asked before: when a connection begins, and after each fault that does not end it. ``swallow`` takes every byte and
passes none on.
"""

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

CHUNK_BYTES = 65536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: closing sends a reset


@dataclass(frozen=True)
class Fault:
    """What happens ``at`` bytes from now to what the server sends (to what the client sends, where ``upstream``).

    ``cut`` closes both sides there in order, ``reset`` with a reset; ``delay`` waits ``seconds`` there; ``corrupt``
    replaces that byte by ``byte``.
    """

    kind: Literal["cut", "reset", "delay", "corrupt"]
    at: int = 0
    seconds: float = 0.0
    byte: bytes = b"\0"
    upstream: bool = False


class Proxy:
    """Proxy before a server on ``port`` of this machine. ``done`` counts the faults that were reached, by kind."""

    def __init__(self, port: int, fault: Callable[[int], Fault | None] = lambda number: None) -> None:
        self._target = port
        self.fault = fault
        self.swallow = False
        self.asked = 0
        self.done: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _close(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self._end(writer, reset=True)
            return
        fault = self._next_fault()
        up, down = (fault, None) if fault and fault.upstream else (None, fault)
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, up)),
            asyncio.create_task(self._pump(server_reader, writer, down)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            reset = any(pump.result() for pump in done)
        finally:
            for pump in pumps:
                pump.cancel()
        self._end(server_writer, reset=reset)
        self._end(writer, reset=reset)

    def _next_fault(self) -> Fault | None:
        self.asked += 1
        return self.fault(self.asked - 1)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> bool:
        """Pass bytes on until the connection or a fault ends it; returns whether it is to be reset."""
        left = fault.at if fault else 0
        while data := await self._read(reader):
            if self.swallow:
                continue
            while fault is not None and left < len(data):
                self.done[fault.kind] += 1
                await self._write(writer, data[:left])
                data = data[left:]
                if fault.kind in ("cut", "reset"):
                    return fault.kind == "reset"
                if fault.kind == "delay":
                    await asyncio.sleep(fault.seconds)
                else:
                    data = fault.byte + data[1:]
                    await self._write(writer, data[:1])
                    data = data[1:]
                fault = self._next_fault()
                left = fault.at if fault else 0
            left -= len(data)
            await self._write(writer, data)
        return False

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(CHUNK_BYTES)
        except ConnectionError:
            return b""

    def _end(self, writer: asyncio.StreamWriter, *, reset: bool) -> None:
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        else:
            writer.close()


def random_fault(number: int, *, seed: int, longest: int) -> Fault:
    """A fault within the next ``longest`` bytes, the same for the same seed and number."""
    dice = random.Random(seed * 1_000_003 + number)
    kind: Literal["cut", "reset", "delay", "corrupt"] = dice.choice(["cut", "reset", "delay", "corrupt", "corrupt"])
    return Fault(
        kind, at=dice.randrange(longest), seconds=dice.random() * 0.05, byte=bytes([dice.randrange(256)]),
        upstream=dice.random() < 0.2,
    )  # fmt: skip
