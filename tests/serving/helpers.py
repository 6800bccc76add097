"""What the tests of keepers ask again and again."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from aerie.serving.client import ServerHandle
from aerie.serving.launch import Launched
from aerie.serving.lease import read_address
from aerie.serving.plan import ServerPlan

Make = Callable[..., ServerPlan]
Ensure = Callable[..., ServerHandle]
Launch = Callable[[ServerPlan], Launched]
Processes = Callable[[], list[psutil.Process]]


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def keeper_pid(folder: Path) -> int:
    address = read_address(folder)
    assert address is not None
    return address.keeper.pid
