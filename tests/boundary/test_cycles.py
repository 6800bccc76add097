import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.boundary.cycles import Cycle, find_cycles


def every_cycle(ids: list[int]) -> set[Cycle]:
    """By the definition, position by position."""
    found = set()
    for period in range(1, 129):
        start = 0
        for index in range(period, len(ids) + 1):
            if index == len(ids) or ids[index] != ids[index - period]:
                if index - start >= max(48, 3 * period):
                    found.add(Cycle(start, index, period))
                start = index - period + 1
    return found


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 50), min_size=1, max_size=130),
    st.integers(0, 410),
    st.lists(st.integers(0, 2), max_size=40),
)
def test_no_cycle_is_missed_or_made_up(before: list[int], unit: list[int], length: int, after: list[int]) -> None:
    ids = [*before, *(unit * (length // len(unit) + 1))[:length], *after]
    assert set(find_cycles(np.array(ids, np.int64))) == every_cycle(ids)


@pytest.mark.parametrize("period", [1, 15, 16, 17, 47, 127, 128])
def test_cycle_of_every_period_counts_from_three_copies_and_48_tokens_wherever_it_starts(period: int) -> None:
    least = max(48, 3 * period)
    unit = list(range(1000, 1000 + period))
    for start in range(9):
        rotated = [*range(start), *(unit * 64)[:least], 5000]
        assert Cycle(start, start + least, period) in set(find_cycles(np.array(rotated, np.int64)))
        shorter = [*range(start), *(unit * 64)[: least - 1], 5000]
        assert not list(find_cycles(np.array(shorter, np.int64)))


def test_period_past_128_is_no_cycle() -> None:
    assert not list(find_cycles(np.array(list(range(129)) * 4, np.int64)))
