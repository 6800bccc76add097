"""The planner's arithmetic against figures measured on the reference deployment (8 GPUs, Kimi-K2.5)."""

from dataclasses import replace

import pytest

from aerie.serving.errors import PlanRefused
from aerie.serving.memory import HostMemory, PoolLine, PoolRow, require_host_holds

BF16, FP8 = 70_272, 35_136
MEASURED = (
    PoolRow(0.85, 116_171, BF16),
    PoolRow(0.88, 159_277, BF16),
    PoolRow(0.93, 231_120, BF16),
    PoolRow(0.90, 376_029, FP8),
)


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_any_two_measured_rows_give_the_other_two(first: int, second: int) -> None:
    if first == second:
        with pytest.raises(PlanRefused, match="give no line"):
            PoolLine.through(MEASURED[first], MEASURED[second])
        return
    line = PoolLine.through(MEASURED[first], MEASURED[second])
    for row in MEASURED:
        assert line.tokens(row.fraction, row.bytes_per_token) == pytest.approx(row.tokens, rel=1e-3)


def test_rows_that_no_server_can_have_are_refused() -> None:
    with pytest.raises(PlanRefused, match="a larger fraction must hold more"):
        PoolLine.through(PoolRow(0.85, 159_277, BF16), PoolRow(0.88, 116_171, BF16))
    with pytest.raises(PlanRefused, match=r"more than 1\.00 GiB hold"):
        PoolLine.calibrated(2**30, [PoolRow(0.5, 1_000_000, BF16)])


def test_one_row_and_the_memory_give_the_line() -> None:
    line = PoolLine.calibrated(94.04 * 2**30, MEASURED[:1])
    assert [line.tokens(row.fraction, row.bytes_per_token) for row in MEASURED] == pytest.approx(
        [row.tokens for row in MEASURED], rel=1e-3
    )


REFERENCE = HostMemory(available_gb=445, loading_gb=40, ranks=8)


def test_safe_hierarchical_cache_is_that_of_the_reference() -> None:
    assert REFERENCE.safe_hicache_gb_per_rank == 48
    assert HostMemory(available_gb=30, loading_gb=40, ranks=8).safe_hicache_gb_per_rank == 0
    require_host_holds(REFERENCE, hicache_gb_per_rank=48)


def test_a_size_per_rank_that_was_meant_for_the_host_is_refused_with_the_sum() -> None:
    with pytest.raises(PlanRefused, match=r"8 ranks x 300 GB = 2400 GB.* 445 GB available.* = 48"):
        require_host_holds(REFERENCE, hicache_gb_per_rank=300)


def test_a_hierarchical_cache_that_leaves_no_memory_for_the_states_beside_it_is_refused_with_the_sum() -> None:
    capturing = replace(REFERENCE, states_gb=16 * 2**30 / 1e9)
    assert capturing.safe_hicache_gb_per_rank == int(0.95 * (445 - 40 - 17.18) / 8) == 46
    require_host_holds(capturing, hicache_gb_per_rank=46)
    with pytest.raises(PlanRefused, match=r"capture_memory_gib 17\.18 GB: .* \(445 - 40 - 17\.18\) / 8\) = 46"):
        require_host_holds(capturing, hicache_gb_per_rank=48)


def test_states_that_do_not_fit_beside_loading_are_refused_without_a_hierarchical_cache_too() -> None:
    require_host_holds(HostMemory(available_gb=50, loading_gb=40, ranks=8), hicache_gb_per_rank=0)
    with pytest.raises(PlanRefused, match=r"50 GB available, of which loading takes 40 GB and .*: lower hidden_states"):
        require_host_holds(HostMemory(50, 40, 8, states_gb=17.18), hicache_gb_per_rank=0)
