from pathlib import Path

from aerie.local.testing import FOLDERS

TESTS = Path(__file__).parents[1]


def test_no_folder_of_tests_is_left_out_or_run_twice() -> None:
    run = [name for names in FOLDERS.values() for name in names]
    assert sorted(run) == sorted(path.name for path in TESTS.iterdir() if list(path.glob("test_*.py")))
