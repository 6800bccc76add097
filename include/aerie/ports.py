"""TCP ports of this machine that are free, and stay so until a server that was told one listens on it."""

import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aerie.errors import Failed

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, LAST_PORT = 10_000, 65_535
TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nothing listens on now, and that the kernel gives to nobody who asks for any port.

    One that the kernel chose may be chosen again before it is used: a starting SGLang opens dozens of sockets on such
    ports, and has taken the one that it was to answer on itself.

    Raises:
        Failed: none was found.
    """
    low, high = map(int, EPHEMERAL.read_text().split())
    candidates = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    for _ in range(TRIES):
        port = secrets.choice(candidates or range(FIRST_PORT, LAST_PORT + 1))
        if port_is_free(port, host):
            return port
    raise Failed(
        f"{host}: {TRIES} ports outside of {low} to {high} are taken or cannot be listened on: name one instead"
    )


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on the port."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((host, port))
        except OSError:
            return False
    return True


@dataclass(frozen=True)
class PortClaim:
    """A port that a server of ours will listen on. Close the claim once it does; it ends with its process."""

    port: int
    _claimed: socket.socket

    def close(self) -> None:
        """Give the claim up."""
        self._claimed.close()


def claim_port(candidates: Iterable[int]) -> PortClaim | None:
    """Claim the first port of this machine on which nothing listens and that nobody else has claimed; None without one.

    Between its choice and the moment at which a server listens on it, a port looks free to everybody. A claim is seen
    by whoever claims, as another user too: the kernel keeps a name without a file, and frees it with the process.
    """
    for port in candidates:
        claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claimed.bind(f"\0aerie port {port}")
        except OSError:
            claimed.close()
            continue
        if port_is_free(port):
            return PortClaim(port, claimed)
        claimed.close()
    return None
