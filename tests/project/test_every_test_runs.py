from pathlib import Path

import pytest

from aerie.local.testing import lanes_of

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("everything", [True, False])
def test_no_folder_of_tests_is_left_out_or_run_twice(everything: bool) -> None:
    run = [name for lane in lanes_of(everything=everything) for part in lane for name in part.folders]
    assert sorted(run) == sorted(path.name for path in TESTS.iterdir() if list(path.glob("test_*.py")))
