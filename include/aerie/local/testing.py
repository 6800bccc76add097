"""Runs the tests: each folder in the environment that its code runs in, then one closing line for all."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.stages import Environment

FOLDERS: Mapping[Environment, tuple[str, ...]] = {
    "airflow": (
        "artefacts", "settings", "store", "stages", "local", "generation", "benchmark", "alerts", "plugins", "dags",
        "project", "browser",
    ),
    "model": ("demo", "sources", "prompts", "boundary", "corpus", "hidden_states", "training", "sabotage"),
    "serve": ("sgl_kernel_cpu", "serving"),
}  # fmt: skip
"""Folders of ``tests/`` by the environment that their code runs in; whole runs are in parts of their own."""


@dataclass(frozen=True)
class Part:
    """Folders of ``tests/`` that one pytest runs."""

    name: str
    environment: Environment
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What a part came to: tests by how they ended, and the failed ones."""

    counts: Counter[str]
    failed: tuple[str, ...]


PARTS = (
    Part("end_to_end", "airflow", ("end_to_end",)),
    Part("airflow", "airflow", FOLDERS["airflow"]),
    Part("serve", "serve", FOLDERS["serve"]),
    Part("installations", "airflow", ("installations",)),
    Part("model", "model", FOLDERS["model"]),
)
"""All tests, in the order in which they begin: two stacks at once would be in each other's way."""

ALL_SIDE_BY_SIDE, QUICK_SIDE_BY_SIDE = 2, 3
"""Parts that run at once: whole runs and keepers of servers mostly wait, but all tests also train and serve."""


def run_tests(*, everything: bool, arguments: Sequence[str]) -> int:
    """Run the tests and return the exit code: 0 when all passed."""
    at_once = ALL_SIDE_BY_SIDE if everything else QUICK_SIDE_BY_SIDE
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as threads:
        run_part = partial(_run_part, Path(folder), everything=everything, arguments=arguments)
        outcomes = list(threads.map(run_part, PARTS))
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    for name in (name for outcome in outcomes for name in outcome.failed):
        typer.echo(f"failed: {name}")
    typer.echo(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


def _run_part(folder: Path, part: Part, *, everything: bool, arguments: Sequence[str]) -> Outcome:
    """Run a part, each line of its output behind its name."""
    report = folder / f"{part.name}.xml"
    with subprocess.Popen(
        _command(part, report, everything=everything, arguments=arguments),
        cwd=PROJECT_ROOT, env=_variables(), text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            typer.echo(f"{part.name:13} | {line.rstrip()}")
    return _outcome_of(part, report, process.returncode)


def _command(part: Part, report: Path, *, everything: bool, arguments: Sequence[str]) -> list[str]:
    folders = [str(PROJECT_ROOT / "tests" / name) for name in part.folders]
    selection = ["--durations=15", "--durations-min=5"] if everything else ["-m", "not slow"]
    pytest = [str(python_of(part.environment)), "-u", "-m", "pytest"]
    return [*pytest, *folders, *selection, f"--junitxml={report}", *arguments]


def _variables() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


NO_TESTS_COLLECTED = 5
MOST_OF_A_MESSAGE = 1500
"""Characters of a failed test's message among the last lines."""


def _outcome_of(part: Part, report: Path, status: int) -> Outcome:
    """Outcome of one pytest run; one that wrote no report, or ended badly without a failed test, is a failure."""
    if not report.exists():
        sys.stderr.write(f"pytest ended with status {status} and no report\n")
        return Outcome(Counter(failed=1), (f"the tests of {part.name}: pytest ended with status {status}",))
    suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 - our own pytest wrote it
    if suite is None:
        return Outcome(Counter(failed=1), (f"the tests of {part.name}: pytest's report is empty",))
    failed = tuple(_failed_tests(suite))
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - len(failed) - skipped
    if status not in (0, NO_TESTS_COLLECTED) and not failed:
        failed = (f"the tests of {part.name}: pytest ended with status {status}",)
    return Outcome(Counter(passed=passed, failed=len(failed), skipped=skipped), failed)


def _failed_tests(suite: ElementTree.Element) -> Iterator[str]:
    """Names of the tests that failed, or whose fixtures did, and how: CI may keep no more than the last lines."""
    for case in suite.iter("testcase"):
        ends = [end for end in (case.find("failure"), case.find("error")) if end is not None]
        if ends:
            words = " ".join((ends[0].get("message") or "").split())
            yield f"{case.get('classname')}::{case.get('name')}".lstrip(":") + f"\n    {words[:MOST_OF_A_MESSAGE]}"
