"""What a person, and CI, read at the end of the tests."""

from pathlib import Path

import pytest

from aerie.local import testing
from aerie.local.testing import Part, run_tests

PASSES = "def test_passes(): pass\n"


def parts(tmp_path: Path, **tests: str) -> tuple[Part, ...]:
    """A part for each of these folders of tests, by its name."""
    for name, text in tests.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(text)
    return tuple(Part(name, "airflow", (str(tmp_path / name),)) for name in tests)


def run(monkeypatch: pytest.MonkeyPatch, tests: tuple[Part, ...]) -> int:
    monkeypatch.setattr(testing, "PARTS", tests)
    return run_tests(everything=True, arguments=["-ra", "-p", "no:cacheprovider"])


def test_a_failure_in_any_part_fails_all_and_is_named_at_the_end(tmp_path, monkeypatch, capsys):
    skips = "import pytest\ndef test_skips(): pytest.skip('no browser')\n"
    bad = "def test_is_wrong(): assert 1 == 2, 'the run ended as failed'\n" + PASSES
    assert run(monkeypatch, parts(tmp_path, good=PASSES, bad=bad, other=skips + PASSES)) == 1
    *before, named, why, closing = capsys.readouterr().out.splitlines()
    assert named.endswith("test_bad::test_is_wrong")
    assert "the run ended as failed" in why
    assert closing == "3 passed, 1 failed, 1 skipped"
    assert any(line.startswith("other         | SKIPPED") and "no browser" in line for line in before)


@pytest.mark.parametrize(
    "text", ["import os\ndef test_exits(): os._exit(0)\n", "import nothing_of_this_name\n"], ids=["exit", "import"]
)
def test_tests_that_did_not_run_to_their_end_are_a_failure(tmp_path, monkeypatch, capsys, text):
    assert run(monkeypatch, parts(tmp_path, whole=PASSES, broken=text)) == 1
    *before, closing = capsys.readouterr().out.splitlines()
    assert any(line.startswith("failed: ") and "broken" in line for line in before)
    assert closing == "1 passed, 1 failed, 0 skipped"
