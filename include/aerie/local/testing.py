"""Runs the tests: each folder in the environment that its code runs in, then one closing line for all."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
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


def run_tests(*, everything: bool, arguments: Sequence[str]) -> int:
    """Run the tests and return the exit code: 0 when all passed."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for environment, names in FOLDERS.items():
            report = Path(folder) / f"{environment}.xml"
            status = _run_pytest(environment, names, report, everything=everything, arguments=arguments)
            counts.update(_counts_of(report, status))
    typer.echo(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


def _run_pytest(
    environment: Environment, names: Sequence[str], report: Path, *, everything: bool, arguments: Sequence[str]
) -> int:
    folders = [str(PROJECT_ROOT / "tests" / name) for name in names if (PROJECT_ROOT / "tests" / name).is_dir()]
    selection = [] if everything else ["-m", "not slow"]
    command = [str(python_of(environment)), "-m", "pytest", *folders, *selection, f"--junitxml={report}", *arguments]
    typer.echo(f"--- tests in the {environment} environment")
    variables = {"OMP_NUM_THREADS": "1", **os.environ, "AERIE_TEST_ENVIRONMENT": environment}
    return subprocess.run(command, cwd=PROJECT_ROOT, env=variables, check=False).returncode


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
