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

END_TO_END = "end_to_end"
FOLDERS: Mapping[Environment, tuple[str, ...]] = {
    "airflow": (
        "artefacts", "settings", "store", "stages", "local", "generation", "benchmark", "alerts", "plugins", "dags",
        "project", "browser", END_TO_END,
    ),
    "model": ("demo", "sources", "prompts", "boundary", "corpus", "hidden_states", "training"),
    "serve": ("sgl_kernel_cpu", "serving"),
}  # fmt: skip
"""Folders of ``tests/`` by the environment that their code runs in."""


@dataclass(frozen=True)
class Part:
    """Folders of ``tests/`` that one pytest runs."""

    name: str
    environment: Environment
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What a part came to: tests by how they ended, and the names of the failed ones."""

    counts: Counter[str]
    failed: tuple[str, ...]


Lane = tuple[Part, ...]
"""Parts that run one after the other."""


def lanes_of(*, everything: bool) -> tuple[Lane, ...]:
    """What runs side by side: the end-to-end runs and the keepers of servers mostly wait.

    The quick tests have one lane for each environment. All tests have two: whole runs take as long as all the rest.
    """
    if not everything:
        return tuple((Part(environment, environment, folders),) for environment, folders in FOLDERS.items())
    rest = tuple(
        Part(environment, environment, tuple(name for name in folders if name != END_TO_END))
        for environment, folders in FOLDERS.items()
    )
    return (Part(END_TO_END, "airflow", (END_TO_END,)),), rest


def run_tests(*, everything: bool, arguments: Sequence[str]) -> int:
    """Run the tests and return the exit code: 0 when all passed."""
    lanes = lanes_of(everything=everything)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(lanes)) as lane_threads:
        run_lane = partial(_run_lane, Path(folder), everything=everything, arguments=arguments)
        outcomes = [outcome for lane in lane_threads.map(run_lane, lanes) for outcome in lane]
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    for name in (name for outcome in outcomes for name in outcome.failed):
        typer.echo(f"failed: {name}")
    typer.echo(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


def _run_lane(folder: Path, lane: Lane, *, everything: bool, arguments: Sequence[str]) -> list[Outcome]:
    """Run the parts of a lane, each line of their output behind the part's name."""
    outcomes = []
    for part in lane:
        report = folder / f"{part.name}.xml"
        command = _command(part, report, everything=everything, arguments=arguments)
        with subprocess.Popen(
            command, cwd=PROJECT_ROOT, env=_variables(), text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            for line in process.stdout or ():
                typer.echo(f"{part.name:10} | {line.rstrip()}")
        outcomes.append(_outcome_of(part, report, process.returncode))
    return outcomes


def _command(part: Part, report: Path, *, everything: bool, arguments: Sequence[str]) -> list[str]:
    folders = [str(PROJECT_ROOT / "tests" / name) for name in part.folders]
    selection = ["--durations=15", "--durations-min=5"] if everything else ["-m", "not slow"]
    pytest = [str(python_of(part.environment)), "-u", "-m", "pytest"]
    return [*pytest, *folders, *selection, f"--junitxml={report}", *arguments]


def _variables() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


NO_TESTS_COLLECTED = 5


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
    """Names of the tests that failed, or whose fixtures did."""
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            yield f"{case.get('classname')}::{case.get('name')}".lstrip(":")
