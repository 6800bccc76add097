import subprocess
import sys
import textwrap

import psutil
import pytest

from aerie.processes import ProcessIdentity, stop_trees, wait_until_gone

STUBBORN = textwrap.dedent(
    """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if len(sys.argv) > 1:
        child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
        print(child.pid, flush=True)
    else:
        print("ready", flush=True)
    time.sleep(600)
    """
)


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_child_in_its_own_session_that_ignores_sigterm_does_not_outlive_the_stop():
    parent, child_pid = start(STUBBORN)
    child = ProcessIdentity.of(int(child_pid))
    assert stop_trees([ProcessIdentity.of(parent.pid)], grace_seconds=0.2) == []
    parent.wait(5)
    assert wait_until_gone(child, 5)


def test_a_process_that_took_over_the_pid_is_not_stopped():
    other, _ = start()
    try:
        earlier = ProcessIdentity(pid=other.pid, created=psutil.Process(other.pid).create_time() - 60)
        assert earlier.find() is None
        stop_trees([earlier], grace_seconds=0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_zombie_counts_as_gone():
    process, _ = start()
    identity = ProcessIdentity.of(process.pid)
    psutil.Process(process.pid).kill()
    assert wait_until_gone(identity, 5)
    process.wait()


def test_no_identity_for_a_pid_that_nobody_has():
    process, _ = start()
    process.kill()
    process.wait()
    assert ProcessIdentity.of_or_none(process.pid) is None
    with pytest.raises(psutil.NoSuchProcess):
        ProcessIdentity.of(process.pid)
