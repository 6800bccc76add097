"""A TCP proxy that does to a connection what networks do: cut it, delay it, reset it, lose its end, change its bytes.

It runs in a thread of its own. What it does is decided for each connection by ``fault``, which is given the
connection's number, from 0, and may be changed at any time; ``swallow`` takes every byte and answers none.
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CHUNK_BYTES = 65536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: closing sends a reset


@dataclass(frozen=True)
class Fault:
    """What happens to the server's ``at``-th byte on a connection (to the client's, where ``upstream``).

    ``cut`` closes both sides there in order, ``reset`` with a reset; ``delay`` waits ``seconds`` there; ``corrupt``
    replaces that byte by ``byte``, and everything after it goes through as it is.
    """

    kind: Literal["cut", "reset", "delay", "corrupt"]
    at: int = 0
    seconds: float = 0.0
    byte: bytes = b"\0"
    upstream: bool = False


class Proxy:
    """Proxy before a server on ``port`` of this machine. ``connections`` counts those accepted."""

    def __init__(self, port: int, fault: Callable[[int], Fault | None] = lambda number: None) -> None:
        self._target = port
        self.fault = fault
        self.swallow = False
        self.connections = 0
        self.done = 0  # faults that were reached
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
        fault = self.fault(self.connections)
        self.connections += 1
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            return self._end(writer, reset=True)
        up = fault if fault and fault.upstream else None
        down = fault if fault and not fault.upstream else None
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, up)),
            asyncio.create_task(self._pump(server_reader, writer, down)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reset = bool(fault and fault.kind == "reset")
            for pump in pumps:
                pump.cancel()
            self._end(server_writer, reset=reset)
            self._end(writer, reset=reset)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        """Pass bytes on until the connection ends or a fault ends it."""
        passed = 0
        while data := await self._read(reader):
            if self.swallow:
                continue
            inside = fault is not None and passed <= fault.at < passed + len(data)
            if fault is not None and inside:
                self.done += 1
                before, data = data[: fault.at - passed], data[fault.at - passed :]
                writer.write(before)
                await writer.drain()
                passed += len(before)
                if fault.kind in ("cut", "reset"):
                    return
                if fault.kind == "delay":
                    await asyncio.sleep(fault.seconds)
                else:
                    data = fault.byte + data[1:]
            passed += len(data)
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


def random_fault(number: int, *, seed: int, share: float, longest: int) -> Fault | None:
    """The fault of a connection, the same for the same seed: none for most, anywhere in the first ``longest`` bytes."""
    dice = random.Random(seed * 1_000_003 + number)
    if dice.random() >= share:
        return None
    kind: Literal["cut", "reset", "delay", "corrupt"] = dice.choice(["cut", "reset", "delay", "corrupt", "corrupt"])
    return Fault(
        kind, at=dice.randrange(longest), seconds=dice.random() * 0.2, byte=bytes([dice.randrange(256)]),
        upstream=dice.random() < 0.2,
    )  # fmt: skip
