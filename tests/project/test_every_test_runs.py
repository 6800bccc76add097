from collections import Counter
from pathlib import Path

from aerie.local.testing import PARTS

TESTS = Path(__file__).parents[1]


def test_no_folder_of_tests_is_left_out_or_run_twice() -> None:
    run = Counter(name for part in PARTS for name in part.folders)
    assert run == Counter(path.name for path in TESTS.iterdir() if list(path.glob("test_*.py")))
