"""Several owners of one server: sharing it, waiting for it, and letting it go."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from aerie.errors import Busy
from aerie.serving import client, holders
from aerie.serving.client import ServerHandle
from aerie.serving.errors import LeaseLost
from aerie.serving.holders import Holds, Queue
from aerie.serving.lease import read_lease

from .helpers import Ensure, Make, Processes, keeper_pid, runs, until


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Threads for what waits."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def owners(folder: Path) -> list[str]:
    lease = client.status(folder)
    return [] if lease is None else [holder.owner for holder in lease.holders]


def waiting(folder: Path) -> list[str]:
    lease = client.status(folder)
    return [] if lease is None else [one.owner for one in lease.waiting]


def test_the_last_owner_to_let_go_ends_the_server(
    ensure: Ensure, fake_plan: Make, folder: Path, processes_of: Processes
) -> None:
    first, second = ensure(fake_plan(), owner="run 1"), ensure(fake_plan(), owner="run 2")
    assert second.launch_token == first.launch_token
    assert second.reused
    family, keeper = processes_of(), psutil.Process(keeper_pid(folder))
    left = client.release(folder, "run 1")
    assert left is not None
    assert [holder.owner for holder in left.holders] == ["run 2"]
    assert all(map(runs, family))
    with pytest.raises(LeaseLost, match="run 1 holds the server"):
        client.renew(first)
    client.renew(second)
    assert client.release(folder, "run 2") is None
    assert not any(map(runs, family))
    assert until(lambda: not runs(keeper))
    assert read_lease(folder) is None


def test_a_stranger_to_the_server_does_not_end_it(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    ensure(fake_plan(), owner="run 1")
    left = client.release(folder, "run 2")
    assert left is not None
    assert owners(folder) == ["run 1"]


def test_each_hold_has_a_deadline_of_its_own(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    """A run that was killed releases nothing: its hold runs out, and the other's stays."""
    killed = ensure(fake_plan(), owner="killed", lease_seconds=2.0)
    ensure(fake_plan(), owner="alive", lease_seconds=60.0)
    assert until(lambda: owners(folder) == ["alive"])
    with pytest.raises(LeaseLost, match="not renewed in time"):
        client.renew(killed)
    lease = read_lease(folder)  # what people find on disk says the same
    assert lease is not None
    assert [holder.owner for holder in lease.holders] == ["alive"]


def test_the_longest_holder_decides_how_long_a_shared_server_lives(
    ensure: Ensure, fake_plan: Make, processes_of: Processes
) -> None:
    ensure(fake_plan(), lease_seconds=30.0)
    assert ensure(fake_plan(), lease_seconds=1.0).reused
    time.sleep(4)
    assert all(map(runs, processes_of()))
    assert len(processes_of()) == 2


def test_concurrent_ensures_share_one_server(ensure: Ensure, fake_plan: Make) -> None:
    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(lambda number: ensure(fake_plan(), owner=f"run {number}"), range(4)))
    assert len({handle.launch_token for handle in handles}) == 1


def test_another_plan_waits_until_the_server_is_free_and_says_for_whom(
    ensure: Ensure, fake_plan: Make, folder: Path, background: ThreadPoolExecutor, processes_of: Processes
) -> None:
    first = ensure(fake_plan(), owner="run 1")
    family, lines = processes_of(), list[str]()
    second = background.submit(ensure, fake_plan(phase="benchmark"), owner="run 2", report=lines.append)
    assert until(lambda: waiting(folder) == ["run 2"])
    client.renew(first)
    assert all(map(runs, family))
    assert client.release(folder, "run 1") is None
    assert second.result(30).launch_token != first.launch_token
    assert owners(folder) == ["run 2"]
    assert waiting(folder) == []
    assert not any(map(runs, family))
    assert lines[0].startswith(f"waiting for the server: generate server {first.url} is held by run 1 (until 20")
    assert sum(line.startswith("waiting") for line in lines) == 1  # not one for each time that it asked


def test_who_does_not_want_to_wait_long_is_told_who_holds_the_server(
    ensure: Ensure, fake_plan: Make, folder: Path
) -> None:
    first = ensure(fake_plan(), owner="run 1")
    with pytest.raises(Busy, match=f"{first.url} is held by run 1"):
        ensure(fake_plan(phase="benchmark"), owner="run 2", queue_seconds=0.0)
    assert owners(folder) == ["run 1"]


def test_what_needs_the_gpus_without_a_server_is_told_which_one_has_them(
    ensure: Ensure, fake_plan: Make, folder: Path
) -> None:
    client.require_unused(folder, by="run 2")
    first = ensure(fake_plan(), owner="run 1")
    client.require_unused(folder, by="run 1")
    with pytest.raises(Busy, match=f"generate server {first.url} has the GPUs, and is held by run 1"):
        client.require_unused(folder, by="run 2")


def test_the_phases_of_a_run_replace_each_other_without_waiting(
    ensure: Ensure, fake_plan: Make, folder: Path, background: ThreadPoolExecutor
) -> None:
    ensure(fake_plan(), owner="run 1")
    ensure(fake_plan(phase="benchmark"), owner="run 1")
    assert owners(folder) == ["run 1"]


def test_an_owner_that_asks_for_another_plan_gives_the_server_to_who_waits(
    ensure: Ensure, fake_plan: Make, folder: Path, background: ThreadPoolExecutor
) -> None:
    ensure(fake_plan(), owner="run 1")
    second = background.submit(ensure, fake_plan(max_total_tokens=99), owner="run 2")
    assert until(lambda: waiting(folder) == ["run 2"])
    third = background.submit(ensure, fake_plan(phase="benchmark"), owner="run 1")
    assert until(lambda: second.done() and waiting(folder) == ["run 1"])
    assert owners(folder) == ["run 2"]
    assert not third.done()
    client.release(folder, "run 2")
    third.result(30)
    assert owners(folder) == ["run 1"]


def test_who_came_first_is_served_first_even_before_one_who_could_share(
    ensure: Ensure, fake_plan: Make, folder: Path, background: ThreadPoolExecutor
) -> None:
    """Else new owners of the plan that is served would keep the one who waits out for good."""
    ensure(fake_plan(), owner="run 1")
    other: Future[ServerHandle] = background.submit(ensure, fake_plan(phase="benchmark"), owner="run 2")
    assert until(lambda: waiting(folder) == ["run 2"])
    same = background.submit(ensure, fake_plan(), owner="run 3")
    assert until(lambda: waiting(folder) == ["run 2", "run 3"])
    client.release(folder, "run 1")
    other.result(30)
    assert not same.done()
    client.release(folder, "run 2")
    same.result(30)
    assert owners(folder) == ["run 3"]


def test_who_holds_the_server_is_not_held_up_by_who_waits(
    ensure: Ensure, fake_plan: Make, folder: Path, background: ThreadPoolExecutor
) -> None:
    """The second data set of a run, and a task that is tried again, go on with the run's server."""
    first = ensure(fake_plan(), owner="run 1")
    other = background.submit(ensure, fake_plan(phase="benchmark"), owner="run 2")
    assert until(lambda: waiting(folder) == ["run 2"])
    again = ensure(fake_plan(), owner="run 1")
    assert (again.reused, again.launch_token) == (True, first.launch_token)
    client.release(folder, "run 1")
    other.result(30)


def test_a_failed_server_is_waited_for_by_nobody(ensure: Ensure, fake_plan: Make, folder: Path) -> None:
    with pytest.raises(Exception, match="CUDA out of memory"):
        ensure(fake_plan("exits at start"), owner="run 1")
    assert not ensure(fake_plan(), owner="run 2").reused
    assert owners(folder) == ["run 2"]


def test_a_client_that_no_longer_asks_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed: whoever stands behind it has its turn."""
    queue = Queue()
    with queue.asking("dead", "generate"), queue.asking("alive", "generate"):
        assert queue.ahead_of("alive") == ["dead"]
    monkeypatch.setattr(holders, "FORGOTTEN_SECONDS", 0.0)
    with queue.asking("alive", "generate"):
        assert queue.ahead_of("alive") == []


def test_a_client_whose_question_is_being_answered_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "FORGOTTEN_SECONDS", 0.0)
    queue = Queue()
    with queue.asking("first", "generate"):
        assert [one.owner for one in queue.listed()] == ["first"]
        assert queue
    assert not queue


def test_a_renewal_never_shortens_a_hold() -> None:
    holds = Holds()
    holds.hold("run 1", 100.0)
    holds.hold("run 1", -1.0)
    assert holds.expire() == []
    (holder,) = holds.listed()
    assert holder.expires_at > time.time() + 90
    holds.hold("run 2", -1.0)
    assert holds.expire() == ["run 2"]


def test_keeper_stays_for_who_waits_when_the_last_owner_is_gone(
    ensure: Ensure, fake_plan: Make, folder: Path, background: ThreadPoolExecutor
) -> None:
    ensure(fake_plan("ignores SIGTERM"), owner="run 1", lease_seconds=2.0)
    pid = keeper_pid(folder)
    done = threading.Event()
    other = background.submit(ensure, fake_plan(phase="benchmark"), owner="run 2", report=lambda _: done.set())
    assert done.wait(20)
    other.result(40)
    assert keeper_pid(folder) == pid
