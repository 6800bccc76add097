"""Ports that are given to servers before they listen on them."""

import socket

import pytest

from aerie import ports
from aerie.errors import Failed
from aerie.ports import EPHEMERAL, free_port, port_is_free


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
