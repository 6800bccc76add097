"""The demo as a newcomer runs it: killed in the middle, repeated at once, and judged by its summary."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aerie.local.configuration import STACK_ID_VARIABLE
from aerie.settings.machine import PROJECT_ROOT, aerie_home
from aerie.settings.pipeline import DATASET_KEYS, GENERATED_KEYS

HOME = aerie_home() / "test-demo"
VARIABLES = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("AERIE_", "AIRFLOW"))},
    "AERIE_HOME": str(HOME),
}


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(PROJECT_ROOT / "aerie"), *arguments], env=VARIABLES, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def home() -> Iterator[Path]:
    def clear() -> None:
        assert start("down", "--purge").wait(300) == 0

    HOME.mkdir(parents=True, exist_ok=True)
    if not (HOME / "envs").exists():
        (HOME / "envs").symlink_to(aerie_home() / "envs")
    clear()
    yield HOME
    clear()


def of_stack(stack_id: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(STACK_ID_VARIABLE) == stack_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_demo_that_was_killed_while_generating_completes_when_it_is_run_again(home):
    first = start("demo", "--once")
    assert first.stdout is not None
    for line in first.stdout:
        if ".generate: running" in line:
            break
    first.send_signal(signal.SIGKILL)
    first.wait()

    path = home / "summary.json"
    second = start("demo", "--once", "--json", str(path))
    output, _ = second.communicate(timeout=2300)
    assert second.returncode == 0, output
    assert "which an earlier command started" in output

    summary = json.loads(path.read_text())
    assert summary["state"] == "success"
    assert tuple(summary["datasets"]) == DATASET_KEYS
    for key in GENERATED_KEYS:
        row = summary["datasets"][key]
        assert row["reasoning_share"] >= 0.95, key
        responses = (
            (home / "data" / "editions" / "main" / "datasets" / key / "responses.jsonl").read_text().splitlines()
        )
        samples = [json.loads(response)["sample_id"] for response in responses]
        assert len(samples) == len(set(samples)) == row["generated"], key
    stopped = [summary["datasets"][key]["stopped_by"] for key in GENERATED_KEYS]
    assert stopped.count("budget") >= 5
    assert summary["hidden_states"]["files"] == summary["corpus"]["rows"]
    assert summary["benchmark"]["acceptance_length"] >= 2.5
    assert summary["benchmark"]["acceptance_length_untrained"] <= 1.1
    assert summary["benchmark"]["lossless"] is True

    stack_id = json.loads((home / "stack.json").read_text())["stack_id"]
    assert of_stack(stack_id) == []
