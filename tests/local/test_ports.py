"""Ports that are given to servers before they listen on them."""

import socket
import subprocess
import sys

import pytest

from aerie import ports
from aerie.errors import Failed
from aerie.ports import EPHEMERAL, claim_port, free_port, port_is_free
from aerie.settings.machine import PROJECT_ROOT


def test_a_free_port_is_one_that_the_kernel_gives_to_nobody_else() -> None:
    low, high = map(int, EPHEMERAL.read_text().split())
    for _ in range(200):
        port = free_port()
        assert port_is_free(port)
        assert not low <= port <= high


def test_a_port_that_something_listens_on_is_not_free() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert not port_is_free(listening.getsockname()[1])


def test_an_address_of_another_host_has_no_free_port() -> None:
    with pytest.raises(Failed, match=f"192.0.2.1: {ports.TRIES} ports .* name one"):
        free_port("192.0.2.1")


def test_two_who_claim_at_once_never_get_one_port_though_nothing_listens_yet() -> None:
    candidates = [free_port() for _ in range(3)]
    first, second = claim_port(candidates), claim_port(candidates)
    assert first and second and (first.port, second.port) == tuple(candidates[:2])
    first.close()
    third = claim_port(candidates)
    assert third and third.port == candidates[0]
    second.close()
    third.close()


def test_a_claim_is_seen_by_other_processes_and_ends_with_its_own() -> None:
    port = free_port()
    program = (
        f"from aerie.ports import claim_port; claim = claim_port([{port}]); print(bool(claim), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"PYTHONPATH": str(PROJECT_ROOT / "include")},
    ) as other:  # fmt: skip
        assert other.stdout and other.stdout.readline() == "True\n"
        assert claim_port([port]) is None
        other.kill()
        other.wait()
    claim = claim_port([port])
    assert claim is not None
    claim.close()


def test_a_port_that_something_listens_on_is_not_claimed() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert claim_port([listening.getsockname()[1]]) is None
