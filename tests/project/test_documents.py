"""The documents: their links lead somewhere, and what they say of the code is so."""

import ast
import functools
import re
from pathlib import Path

import pytest

from aerie import errors
from aerie.settings.machine import PROJECT_ROOT
from aerie.stages import STAGES

from .conftest import tracked_files

DOCUMENTS = [path for path in tracked_files() if path.suffix == ".md"]
ARCHITECTURE = PROJECT_ROOT / "docs" / "architecture.md"
EACH = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT_ROOT)))
OPERATIONS = PROJECT_ROOT / "docs" / "operations.md"
# Words of Airflow, PostgreSQL, Docker and the kernel.
OF_OTHERS = {
    "scheduled", "up_for_reschedule", "unhealthy", "InvalidToken", "permission denied for table", "Permission denied",
    "bind source path does not exist",
}  # fmt: skip
OF_CELERY = {"AIRFLOW__CELERY__BROKER_URL", "AIRFLOW__CELERY__RESULT_BACKEND"}
"""Variables of a provider that is in no lock of ours: nothing here sets them."""
VARIABLE = re.compile(r"\b(?:AERIE_|AIRFLOW__)[A-Z_]*[A-Z]\b")
OUR_FOLDERS = ("benchmarks", "dags", "demo", "docker", "docs", "include", "plugins", "requirements", "tests")


def prose(document: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EACH
def test_a_link_to_a_file_of_ours_leads_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name) if name else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@EACH
def test_a_file_that_is_named_is_there(document: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(OUR_FOLDERS)})/[\w./-]*)`", prose(document))
    assert [name for name in named if not (PROJECT_ROOT / name).exists() and "secrets" not in name] == []


@functools.cache
def known_variables() -> frozenset[str]:
    """Variables that the code, the scripts and the Compose files read or set."""
    ours = [
        path for path in tracked_files() if path.suffix != ".md" and path.relative_to(PROJECT_ROOT).parts[0] != "tests"
    ]
    return frozenset(
        name for path in ours for name in VARIABLE.findall(path.read_text(encoding="utf-8", errors="ignore"))
    )


@EACH
def test_a_variable_that_is_named_is_one_that_something_reads(document: Path) -> None:
    named = set(VARIABLE.findall(document.read_text(encoding="utf-8")))
    assert sorted(named - known_variables() - OF_CELERY) == []


def rows_under(header: str) -> list[list[str]]:
    """Rows of the table of docs/architecture.md whose header begins so."""
    table = re.search(rf"^\| {header} .*\n\|[-|]+\n((?:\|.*\n)+)", ARCHITECTURE.read_text("utf-8"), re.MULTILINE)
    assert table
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_each_stage_is_said_to_run_where_it_runs() -> None:
    said = {
        name: (environment, code.strip("`"))
        for stages, environment, code, _ in rows_under("stage")
        for name in re.findall(r"`(\w+)`", stages)
    }
    assert said.keys() == STAGES.keys()
    for name, (environment, code) in said.items():
        module = STAGES[name].function.partition(":")[0].replace(".", "/")
        assert environment == STAGES[name].environment, name
        assert f"include/{module}.py".startswith(code), name


def test_each_error_is_said_to_have_the_exit_code_that_it_has() -> None:
    said = {name.strip("`"): int(code) for name, code, _ in rows_under("class")}
    assert said == {
        kind.__name__: kind.exit_code for kind in (errors.Failed, errors.BadInput, errors.Retryable, errors.Busy)
    }


def sayings() -> str:
    """Everything that the code may say: every text in it, one a line."""
    texts = []
    for path in tracked_files():
        if path.suffix == ".py" and path.relative_to(PROJECT_ROOT).parts[0] in ("include", "plugins"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts += [
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            texts += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return "\n".join(texts)


def test_a_symptom_is_in_the_words_of_the_code() -> None:
    """Whoever looks for a message finds it; ``...`` stands for what differs."""
    _, _, symptoms = OPERATIONS.read_text(encoding="utf-8").partition("## By symptom")
    cells = re.findall(r"^\| ((?!symptom|-).*?) \|", symptoms, re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(cells) > 40 and len(quoted) > 25
    known = sayings()
    assert [text for text in quoted if text not in OF_OTHERS and not all(p in known for p in text.split(" ... "))] == []
