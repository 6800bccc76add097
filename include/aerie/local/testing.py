"""Runs the tests: each folder in the environment that its code runs in, then one closing line for all."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import typer

from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.stages import Environment

FOLDERS: Mapping[Environment, tuple[str, ...]] = {
    "airflow": (
        "artefacts", "settings", "store", "stages", "local", "generation", "benchmark", "plugins", "dags", "project",
        "end_to_end",
    ),
    "model": ("demo", "sources", "prompts", "boundary", "corpus", "hidden_states", "training"),
    "serve": ("sgl_kernel_cpu", "serving"),
}  # fmt: skip
"""Folders of ``tests/`` by the environment that their code runs in."""


LANES: tuple[tuple[Environment, ...], ...] = (("airflow",), ("model",), ("serve",))
"""What the quick tests run side by side: the end-to-end run and the keepers of servers mostly wait."""


def run_tests(*, everything: bool, arguments: Sequence[str]) -> int:
    """Run the tests and return the exit code: 0 when all passed."""
    lanes = (tuple(FOLDERS),) if everything else LANES
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(lanes)) as lane_threads:
        run_lane = partial(_run_lane, Path(folder), everything=everything, arguments=arguments, live=len(lanes) == 1)
        counts = sum(lane_threads.map(run_lane, lanes), Counter[str]())
    typer.echo(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


def _run_lane(
    folder: Path, environments: Sequence[Environment], *, everything: bool, arguments: Sequence[str], live: bool
) -> Counter[str]:
    """Run the tests of environments one after the other; unless ``live``, their output comes when each has ended."""
    counts: Counter[str] = Counter()
    for environment in environments:
        report, output = folder / f"{environment}.xml", folder / f"{environment}.txt"
        command = _command(environment, report, everything=everything, arguments=arguments)
        typer.echo(f"--- tests in the {environment} environment")
        with output.open("wb") as captured:
            target = None if live else captured
            status = subprocess.run(
                command, cwd=PROJECT_ROOT, env=_variables(), stdout=target, stderr=target, check=False
            ).returncode
        if not live:
            typer.echo(f"--- the {environment} environment\n{output.read_text(errors='replace')}")
        counts.update(_counts_of(report, status))
    return counts


def _command(environment: Environment, report: Path, *, everything: bool, arguments: Sequence[str]) -> list[str]:
    folders = [str(PROJECT_ROOT / "tests" / name) for name in FOLDERS[environment]]
    selection = [] if everything else ["-m", "not slow"]
    return [str(python_of(environment)), "-m", "pytest", *folders, *selection, f"--junitxml={report}", *arguments]


def _variables() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


NO_TESTS_COLLECTED = 5


def _counts_of(report: Path, status: int) -> Counter[str]:
    """Counts of one pytest run; a run that wrote no report, or ended badly without a failed test, is a failure."""
    if not report.exists():
        sys.stderr.write(f"pytest ended with status {status} and no report\n")
        return Counter(failed=1)
    suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 - our own pytest wrote it
    numbers = {
        name: int(suite.get(name, 0)) if suite is not None else 0 for name in ("tests", "failures", "errors", "skipped")
    }
    failed = numbers["failures"] + numbers["errors"]
    if status not in (0, NO_TESTS_COLLECTED) and not failed:
        failed = 1
    passed = numbers["tests"] - numbers["failures"] - numbers["errors"] - numbers["skipped"]
    return Counter(passed=passed, failed=failed, skipped=numbers["skipped"])
