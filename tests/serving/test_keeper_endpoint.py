"""The keeper's HTTP endpoint: who is let in, and what a user who has only its address and token can do."""

import stat
from pathlib import Path

import pytest
import requests

from aerie.serving import client
from aerie.serving.errors import (
    KeeperUnreachable,
)
from aerie.serving.lease import read_address, token_path

from .helpers import Ensure, Make


def test_endpoint_refuses_strangers(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    ensure(fake_plan())
    assert stat.S_IMODE(token_path(folder).stat().st_mode) == 0o600
    address = read_address(folder)
    assert address is not None
    for headers in ({}, {"Authorization": "Bearer guess"}):
        response = requests.post(f"{address.url}/stop", json={"launch_token": None}, headers=headers, timeout=5)
        assert response.status_code == 401
    token = token_path(folder).read_text()
    token_path(folder).write_text("guess")
    with pytest.raises(KeeperUnreachable, match="refuses the token"):
        client.find_keeper(folder)
    token_path(folder).write_text(token)


def test_malformed_request_is_answered_and_harmless(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    ensure(fake_plan())
    address = read_address(folder)
    assert address is not None
    headers = {"Authorization": f"Bearer {token_path(folder).read_text()}"}
    response = requests.post(f"{address.url}/ensure", data=b"{", headers=headers, timeout=5)
    assert response.status_code == 400
    assert response.json()["error"] == "BadInput"
    assert ensure(fake_plan()).reused
