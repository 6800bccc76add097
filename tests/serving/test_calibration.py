"""Predictions of a server's KV pool, and what observations make of them."""

import json
from pathlib import Path

import pytest

from aerie.artefacts.observations import Observation, PlannedLaunch
from aerie.serving.calibration import (
    GIB,
    MIB,
    Overheads,
    calibrated,
    deviation,
    first_guess,
    predict_tokens,
    require_host_spares,
)
from aerie.serving.checkpoint_files import weights_bytes
from aerie.serving.errors import PlanRefused
from aerie.settings.machine import PROJECT_ROOT

GPU_BYTES = 100 * GIB
MEASURED = ((0.85, 70_272, 116_171), (0.88, 70_272, 159_277), (0.93, 70_272, 231_120), (0.90, 35_136, 376_029))
"""The reference deployment: fraction, bytes per token, tokens that SGLang reported."""


def planned(fraction: float = 0.88, **changes: object) -> PlannedLaunch:
    fields = {
        "plan_fingerprint": "plan", "model_identity": "kimi", "drafter_identity": None, "hostname": "gpu-1",
        "gpu_name": "RTX PRO 6000", "sglang_version": "0.5.23", "device": "cuda", "dtype": "bfloat16",
        "kv_cache_dtype": "auto", "tensor_parallel_size": 8, "data_parallel_size": 1,
        "attention_data_parallel_size": 1, "pipeline_parallel_size": 1, "expert_parallel_size": 1,
        "mem_fraction_static": fraction, "max_total_tokens": None, "page_size": 1, "bytes_per_token": 70_272,
        "memory_before_launch_bytes": GPU_BYTES,
    }  # fmt: skip
    return PlannedLaunch.model_validate(fields | changes)


def observed(launch: PlannedLaunch, tokens: int, **changes: object) -> Observation:
    fields = {
        "launch_token": "launch-1", "observed_at": 1.0, "taken_by_others_bytes": 0, "memory_left_bytes": None,
        "predicted_max_total_num_tokens": tokens, "max_total_num_tokens": tokens,
    }  # fmt: skip
    return Observation.model_validate(launch.model_dump() | fields | changes)


def reference(row: tuple[float, int, int]) -> Observation:
    return observed(planned(row[0], bytes_per_token=row[1]), row[2])


GUESS = first_guess("cuda", weights_bytes=70 * GIB)


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_two_launches_of_the_reference_deployment_predict_its_others(first: int, second: int) -> None:
    if first == second:
        return
    earlier = [reference(MEASURED[first]), reference(MEASURED[second])]
    for row in MEASURED:
        launch = planned(row[0], bytes_per_token=row[1])
        predicted = predict_tokens(launch, calibrated(GUESS, launch, earlier))
        assert predicted == pytest.approx(row[2], rel=1e-3)


def test_one_launch_makes_the_next_at_its_fraction_exact_and_keeps_the_guess_of_the_start() -> None:
    overheads = calibrated(GUESS, planned(), [reference(MEASURED[1])])
    assert predict_tokens(planned(), overheads) == pytest.approx(159_277, abs=1)
    assert overheads.startup_bytes == GUESS.startup_bytes


def test_the_next_plan_follows_the_latest_launch_however_many_were_otherwise() -> None:
    earlier = [observed(planned(), 120_000), observed(planned(), 121_000), reference(MEASURED[1])]
    assert predict_tokens(planned(), calibrated(GUESS, planned(), earlier)) == pytest.approx(159_277, abs=1)


def test_a_first_launch_is_predicted_from_the_weights_alone() -> None:
    guess = first_guess("cuda", weights_bytes=71.84 * GIB)
    for fraction, bytes_per_token, reported in MEASURED:
        launch = planned(fraction, bytes_per_token=bytes_per_token, memory_before_launch_bytes=round(95.59 * GIB))
        assert predict_tokens(launch, calibrated(guess, launch, [])) == pytest.approx(reported, rel=0.01)
    assert predict_tokens(planned(0.01), guess) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model_identity": "qwen"},
        {"hostname": "gpu-2"},
        {"sglang_version": "0.6.0"},
        {"gpu_name": "H200"},
        {"tensor_parallel_size": 4},
        {"drafter_identity": "a drafter"},
    ],
)
def test_launches_of_another_server_teach_nothing(change: dict[str, object]) -> None:
    other = observed(planned(0.85, **change), 1)
    assert calibrated(GUESS, planned(), [other]) == GUESS


def test_a_pool_that_its_cap_decided_teaches_nothing_and_a_larger_cap_does() -> None:
    capped = observed(planned(max_total_tokens=8_200, page_size=64), 8_192)
    assert calibrated(GUESS, planned(), [capped]) == GUESS
    below_its_cap = observed(planned(max_total_tokens=200_000), 159_277)
    assert calibrated(GUESS, planned(), [below_its_cap]) != GUESS


def test_a_prediction_keeps_to_the_cap_and_to_whole_pages() -> None:
    none = Overheads(0, 0)
    assert predict_tokens(planned(max_total_tokens=1000, page_size=64), none) == 960
    assert predict_tokens(planned(page_size=64), none) % 64 == 0


CPU = {
    "device": "cpu", "gpu_name": None, "tensor_parallel_size": 1, "bytes_per_token": 6_144,
    "memory_before_launch_bytes": 20 * GIB,
}  # fmt: skip


def pool(launch: PlannedLaunch, truth: Overheads, taken: int = 0) -> int:
    memory = launch.memory_before_launch_bytes - taken
    return predict_tokens(launch.model_copy(update={"memory_before_launch_bytes": memory}), truth)


def test_what_other_processes_took_is_not_held_against_the_next_plan() -> None:
    truth = Overheads(1400 * MIB, 60 * MIB)
    first = planned(0.1, **CPU)
    disturbed = observed(first, pool(first, truth, taken=3 * GIB), taken_by_others_bytes=3 * GIB)
    following = planned(0.15, **CPU)
    predicted = predict_tokens(following, calibrated(first_guess("cpu", 0), following, [disturbed]))
    assert predicted == pytest.approx(pool(following, truth), rel=0.005)


def test_close_fractions_on_a_cpu_do_not_make_a_slope_of_its_noise() -> None:
    truth, earlier = Overheads(1400 * MIB, 60 * MIB), []
    for fraction, noise in ((0.10, 12 * MIB), (0.11, -12 * MIB)):
        launch = planned(fraction, **CPU)
        earlier.append(observed(launch, pool(launch, truth) + noise // 6_144))
    following = planned(0.3, **CPU)
    predicted = predict_tokens(following, calibrated(first_guess("cpu", 0), following, earlier))
    assert predicted == pytest.approx(pool(following, truth), rel=0.005)


def test_a_pool_without_a_cap_that_the_host_cannot_spare_is_refused_with_the_sum() -> None:
    guess = first_guess("cpu", 0)
    require_host_spares(planned(0.5, **CPU), guess)
    require_host_spares(planned(0.95, **CPU, max_total_tokens=8192), guess)
    with pytest.raises(PlanRefused, match=r"of 20\.0 GiB available .* take 1\.3, .* pool 17\.7, which leaves 0\.9 GiB"):
        require_host_spares(planned(0.95, **CPU), guess)


def test_a_person_is_told_of_a_pool_that_is_off_by_more_than_a_hundredth() -> None:
    assert deviation(observed(planned(), 100_000, predicted_max_total_num_tokens=100_900)) is None
    told = deviation(observed(planned(), 100_000, predicted_max_total_num_tokens=104_000))
    assert told is not None and "planned 104,000 KV tokens, the server says 100,000, off by +4.0%" in told
    assert "other processes" not in told
    disturbed = observed(planned(), 100_000, predicted_max_total_num_tokens=104_000, taken_by_others_bytes=GIB)
    assert "other processes took +1.00 GiB meanwhile" in str(deviation(disturbed))


def test_plain_weights_count_in_the_type_that_is_served_and_quantised_ones_as_stored(tmp_path: Path) -> None:
    entries = {
        "plain": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
        "packed": {"dtype": "I32", "shape": [4], "data_offsets": [64, 80]},
    }
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(80))
    assert weights_bytes(tmp_path, dtype_bytes=4) == 4 * 8 * 4 + 16
    assert weights_bytes(PROJECT_ROOT / "demo" / "tiny_verifier", dtype_bytes=4) == pytest.approx(4.3e6, rel=0.02)
