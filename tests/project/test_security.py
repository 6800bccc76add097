"""What runs here is the project's own code: no data, parameter or name becomes code, a shell's command or a pickle."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag

from aerie.drafter_benchmarks import parse_parameters
from aerie.settings.machine import PROJECT_ROOT

from .conftest import tracked_files

RUFF = Path(sys.executable).parent / "ruff"
FOLDERS = ("include", "plugins", "dags", "docker", "demo")
# exec, pickles, marshal, eval, YAML's other loaders, shells, templates that do not escape: none may be switched off.
WITHOUT_EXCEPTION = "S102,S301,S302,S307,S506,S602,S604,S605,S609,S701,S702"
MODULES_THAT_UNPICKLE = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
FORBIDDEN_NAMES = {"compile", "eval", "exec", "__import__"}
FORBIDDEN_CALLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "extractall"}
SHELL_EVAL = re.compile(r"(^|[\s;&|(])(eval|(ba|da)?sh\s+-c)\s", re.MULTILINE)
INJECTION = "{{ ''.__class__.__mro__ }}{% for _ in range(3) %}taken{% endfor %}"


def files(*suffixes: str) -> list[Path]:
    """The project's own files of these kinds, tests and benchmarks left out."""
    found = [path for path in tracked_files() if path.relative_to(PROJECT_ROOT).parts[0] in (*FOLDERS, "aerie", ".ci")]
    return [path for path in found if path.suffix in suffixes]


def ruff(*arguments: str | Path, code: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [RUFF, "check", "--isolated", "--no-cache", "--ignore-noqa", "--select", WITHOUT_EXCEPTION, *arguments]
    return subprocess.run(command, cwd=PROJECT_ROOT, input=code, capture_output=True, text=True, check=False)


def unsafe_calls(code: str) -> Iterator[str]:
    """What ruff has no rule for: loaders that unpickle, and calls that take text for code or for a command."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module or ""] if module else [one.name for one in node.names]
            yield from (name for name in names if name.partition(".")[0] in MODULES_THAT_UNPICKLE)
        elif isinstance(node, ast.Call) and is_unsafe(node):
            yield ast.unparse(node)


def is_unsafe(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in FORBIDDEN_NAMES | FORBIDDEN_CALLS or name.endswith(".extractall"):
        return True
    if name == "torch.load":
        return given.get("weights_only") != "True"
    return "True" in (given.get("allow_pickle"), given.get("trust_remote_code"), given.get("shell"))


def test_ruffs_rules_of_security_hold_without_exception() -> None:
    done = ruff(*FOLDERS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "exec(text)", "eval(text)", "import yaml\nyaml.load(text)", "import pickle\npickle.loads(data)",
        "import subprocess\nsubprocess.run(text, shell=True)", "import os\nos.system(text)",
        "import jinja2\njinja2.Environment()", "eval(text)  # noqa: S307",
    ],
)  # fmt: skip
def test_those_rules_see_what_they_are_for(code: str) -> None:
    assert ruff("--stdin-filename", "include/aerie/new.py", "-", code=code).returncode == 1


@pytest.mark.parametrize("path", files(".py"), ids=lambda path: str(path.relative_to(PROJECT_ROOT)))
def test_nothing_unpickles_or_takes_text_for_code(path: Path) -> None:
    assert list(unsafe_calls(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from joblib import load", "torch.load(path)", "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)", "compile(text, 'f', 'exec')", "__import__(name)",
        "archive.extractall()",
        "Model.from_pretrained(path, trust_remote_code=True)", "subprocess.getoutput(text)",
        "run(text, shell=True)",
    ],
)  # fmt: skip
def test_what_unpickles_or_takes_text_for_code_is_seen(code: str) -> None:
    assert list(unsafe_calls(code)) != []


def test_what_is_safe_is_let_through() -> None:
    code = "model.eval()\nre.compile(text)\ntorch.load(path, weights_only=True)\nrun(command, shell=False)"
    assert list(unsafe_calls(code)) == []


def test_no_shell_script_takes_a_variable_for_a_command() -> None:
    scripts = [path for path in files("") if path.read_bytes().startswith(b"#!") and b"sh\n" in path.read_bytes()[:40]]
    assert {path.name for path in scripts} >= {"aerie", "entrypoint", "initialise", "make-secrets", "run"}
    assert [path.name for path in scripts if SHELL_EVAL.search(path.read_text(encoding="utf-8"))] == []
    assert SHELL_EVAL.search('  eval "$1"') and SHELL_EVAL.search('exec sh -c "$command"')


@pytest.fixture(scope="module")
def bag() -> DagBag:
    bag = DagBag(str(PROJECT_ROOT / "dags"))
    assert bag.import_errors == {}
    return bag


def test_no_dag_makes_python_values_out_of_rendered_text(bag: DagBag) -> None:
    assert bag.dags
    assert [dag.dag_id for dag in bag.dags.values() if dag.render_template_as_native_obj] == []


def test_a_runs_parameters_are_no_templates(bag: DagBag) -> None:
    """Airflow renders fields of tasks; what a person asked for is read from the run, and never put into a field."""
    params = dict.fromkeys(("edition", "drafter", "prompts_file", "run_id"), INJECTION)
    for dag in bag.dags.values():
        for task in dag.tasks:
            before = {name: getattr(task, name) for name in task.template_fields}
            assert not re.search(r"\{[{%]", str(before)), task.task_id
            task.render_template_fields({"params": params, "dag": dag, "task": task})  # type: ignore[typeddict-item]
            assert {name: getattr(task, name) for name in task.template_fields} == before, task.task_id


def test_a_parameter_that_looks_like_a_template_stays_what_it_is() -> None:
    assert parse_parameters({"drafter": INJECTION, "prompts_file": INJECTION}).drafter == INJECTION
