"""The memory plan: the reference deployment's rows, verdicts with their sums, and any input at all."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.errors import BadInput
from aerie.serving.attention import KV_DTYPE_BYTES
from aerie.serving.errors import PlanRefused
from aerie.serving.headroom import count_buffers
from aerie.serving.model_config import ModelConfig
from aerie.serving.plan import Phase
from aerie.serving.plan_inputs import DrafterInputs, ObservedPool, PlanInputs
from aerie.serving.planning import MemoryPlan, plan_memory, suggest
from aerie.serving.weights import Ranks, estimate_weights, weights_on_disk
from aerie.settings.bundled import bundled_names
from aerie.settings.machine import PROJECT_ROOT
from tests.serving.shapes import published

GIB = 2**30
ROWS = {(0.85, "auto"): 116_171, (0.88, "auto"): 159_277, (0.93, "auto"): 231_120, (0.90, "fp8_e4m3"): 376_029}
OBSERVED = tuple(ObservedPool(fraction, kind, tokens) for (fraction, kind), tokens in ROWS.items())
KIMI = published("kimi_k25")
PHASES: tuple[Phase, ...] = ("generate", "capture", "benchmark", "deploy")


def kimi(**changes: Any) -> PlanInputs:
    """The reference deployment."""
    fields: dict[str, Any] = {
        "config": KIMI, "mem_fraction_static": 0.88, "gpus": 8, "gpu_memory_gib": 94.04, "tensor_parallel_size": 8,
        "drafter": DrafterInputs(vocabulary=32_000),
    }  # fmt: skip
    return PlanInputs(**{**fields, **changes})


def planned(phase: Phase = "generate", **changes: Any) -> MemoryPlan:
    return plan_memory(kimi(**changes), phase)


@pytest.mark.parametrize("first", OBSERVED)
@pytest.mark.parametrize("second", OBSERVED)
def test_any_two_observations_give_the_others_without_memory_or_weights(
    first: ObservedPool, second: ObservedPool
) -> None:
    if first == second:
        return
    for (fraction, kind), tokens in ROWS.items():
        plan = planned(gpu_memory_gib=None, observed=(first, second), mem_fraction_static=fraction, kv_cache_dtype=kind)
        assert plan.max_total_num_tokens == pytest.approx(tokens, rel=1e-3)
        assert plan.gpu_memory_gib == pytest.approx(94.04, rel=1e-3)


@pytest.mark.parametrize(("fraction", "kind"), ROWS)
def test_the_configuration_alone_gives_the_rows_to_a_percent(fraction: float, kind: str) -> None:
    plan = planned(mem_fraction_static=fraction, kv_cache_dtype=kind)
    assert plan.max_total_num_tokens == pytest.approx(ROWS[fraction, kind], rel=0.01)
    assert "the weights, from the configuration" in plan.estimated


@pytest.mark.parametrize(
    ("fraction", "verdict", "left"), [(0.85, "fits", 8.3), (0.88, "fits", 5.5), (0.93, "tight", 0.8)]
)
def test_what_is_left_after_graphs_decides_as_it_did_on_the_reference(
    fraction: float, verdict: str, left: float
) -> None:
    plan = planned(observed=OBSERVED, mem_fraction_static=fraction)
    assert plan.verdict == verdict
    assert plan.headroom_gib == pytest.approx(left, abs=0.1)
    assert f"94.04 x (1 - {fraction:g}) - 5.78 graphs and buffers = {plan.headroom_gib:.2f} GiB" in plan.reasons[0]


def test_three_gib_is_the_line_between_tight_and_fits() -> None:
    tight, fits = (planned(mem_fraction_static=1 - (5.78 + left) / 94.04) for left in (2.99, 3.02))
    assert (tight.verdict, fits.verdict) == ("tight", "fits")


def test_graphs_that_do_not_fit_are_refused() -> None:
    plan = planned(mem_fraction_static=0.95)
    assert plan.verdict == "refused"
    assert plan.reasons[0].startswith("graphs and buffers do not fit: 94.04 x (1 - 0.95) - 5.78")


def test_graphs_too_large_for_any_fraction_are_told_so() -> None:
    assert "expected a fraction below 0.939" in planned(mem_fraction_static=0.95).reasons[0]
    assert "expected smaller graphs" in planned(cuda_graph_max_batch_size=100_000).reasons[0]


def test_the_fraction_that_a_large_drafter_needs_works_when_it_is_taken() -> None:
    drafter = DrafterInputs(config=published("llama_31_8b"))
    plan = planned("deploy", mem_fraction_static=0.93, drafter=drafter)
    assert plan.verdict == "refused"
    most = float(plan.reasons[0].rpartition("expected a fraction below ")[2])
    assert planned("deploy", mem_fraction_static=most - 0.001, drafter=drafter).verdict == "tight"
    assert planned("deploy", mem_fraction_static=most + 0.001, drafter=drafter).verdict == "refused"


@pytest.mark.parametrize(
    "index", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"metadata": {"total_size": 1e999}}', b'{"metadata": [1]}']
)
def test_an_index_of_weights_that_is_none_is_named(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(BadInput, match=r"model\.safetensors\.index\.json"):
        weights_on_disk(tmp_path)


def test_an_exception_of_a_quantisation_that_is_no_expression_is_named() -> None:
    fields = dict(published("llama_31_8b").fields)
    fields["quantization_config"] = {"quant_method": "gptq", "bits": 4, "ignore": ["re:("]}
    with pytest.raises(BadInput, match=r"'re:\(' is no regular expression"):
        estimate_weights(ModelConfig.of(fields), Ranks(1, 1), dtype="bfloat16")


def test_a_chunk_without_end_is_counted_and_not_gone_through() -> None:
    plan = planned(config=published("llama_31_8b"), chunked_prefill_size=10**12)
    assert plan.verdict == "refused"
    assert "graphs and buffers do not fit" in plan.reasons[0]


def test_a_pool_smaller_than_a_page_names_the_page() -> None:
    plan = planned(page_size=200_000)
    assert plan.verdict == "refused"
    assert "expected a fraction above 0.908, or a smaller page_size than 200,000" in plan.reasons[0]
    assert planned(page_size=200_000, mem_fraction_static=0.91).max_total_num_tokens == 200_000


def test_a_larger_chunk_asks_for_more_left() -> None:
    assert planned(mem_fraction_static=0.9).verdict == "fits"
    assert planned(mem_fraction_static=0.9, chunked_prefill_size=32_768).verdict == "tight"
    assert "at least 3:" in planned(mem_fraction_static=0.9, chunked_prefill_size=2048).reasons[0]


def test_fewer_and_smaller_graphs_leave_more() -> None:
    assert planned(cuda_graph_max_batch_size=64).headroom_gib > planned().headroom_gib
    assert planned("capture").headroom_gib > planned().headroom_gib  # no prefill graphs


def test_weights_that_leave_no_pool_are_refused_with_the_fraction_that_would() -> None:
    plan = planned(mem_fraction_static=0.7)
    assert plan.verdict == "refused"
    assert (plan.max_total_num_tokens, plan.kv_pool_gib) == (0, 0)
    assert "94.04 GiB x 0.7 = 65.83 GiB, and 72.33 GiB are held before it; expected a fraction above 0.769" in str(
        plan.reasons
    )
    assert "more or larger GPUs" in str(planned(gpu_memory_gib=40.0).reasons)


def test_more_ranks_than_gpus_are_refused() -> None:
    assert "16 GPUs are needed, 8 are there: tensor 8 x pipeline 1 x data 2" in str(
        planned(data_parallel_size=2).reasons
    )


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16", "fp4_e2m1"])
def test_quantised_kv_is_refused_without_a_recorded_reason(kind: str) -> None:
    plan = planned(kv_cache_dtype=kind)
    assert plan.verdict == "refused"
    assert f"kv_cache_dtype {kind} changes what the verifier writes" in plan.reasons[0]
    allowed = planned(kv_cache_dtype=kind, allow_quantised_kv="measured on the canary")
    assert allowed.verdict == ("refused" if kind == "fp4_e2m1" else "fits")  # SGLang 0.5.23 has no such type


def test_a_hierarchical_cache_meant_for_the_host_is_refused_and_the_safe_size_offered() -> None:
    plan = planned(hicache_size_gb_per_rank=300, host_ram_gb=449, host_loading_gb=40)
    assert plan.verdict == "refused"
    assert "8 ranks x 300 GB = 2400 GB" in plan.reasons[0]
    assert "floor(0.95 x (449 - 40) / 8) = 48" in plan.reasons[0]
    assert (plan.hicache_gb_total, plan.hicache_safe_gb_per_rank) == (2400, 48)
    safe = planned(hicache_size_gb_per_rank=48, host_ram_gb=445, host_loading_gb=40)
    assert (safe.verdict, safe.hicache_gb_total) == ("fits", 384)
    assert planned("capture", hicache_size_gb_per_rank=300, host_ram_gb=449).hicache_gb_per_rank == 0


def test_states_that_a_generating_server_holds_take_of_the_memory_for_its_hierarchical_cache() -> None:
    host = {"host_ram_gb": 445, "host_loading_gb": 40, "host_states_gb": 17.18}
    plan = planned(hicache_size_gb_per_rank=48, **host)
    assert plan.verdict == "refused"
    assert "of which loading takes 40 GB and hidden_states.capture_memory_gib 17.18 GB" in plan.reasons[0]
    assert (plan.hicache_safe_gb_per_rank, plan.host_states_gb) == (46, 17.18)
    assert planned(hicache_size_gb_per_rank=46, **host).verdict == "fits"
    assert planned(**host | {"host_ram_gb": 50}).verdict == "refused"
    for phase in ("capture", "benchmark"):  # they generate nothing that is kept
        other = planned(phase, hicache_size_gb_per_rank=48, **host)
        assert (other.host_states_gb, "capture_memory_gib" in str(other.reasons)) == (0, False)


def test_loading_is_estimated_where_it_is_not_given_and_a_host_that_is_not_known_is_an_error() -> None:
    plan = planned(hicache_size_gb_per_rank=48, host_ram_gb=449)
    assert plan.host_loading_gb == 40
    assert "the host memory that loading takes" in plan.estimated
    with pytest.raises(BadInput, match="--host-ram-gb"):
        planned(hicache_size_gb_per_rank=48)


def test_a_drafter_costs_weights_and_one_more_layer_of_kv_and_its_own_cache() -> None:
    verifier, drafter = planned("generate", observed=OBSERVED), planned("deploy", observed=OBSERVED)
    assert drafter.bytes_per_token == verifier.bytes_per_token + 1_152
    assert drafter.drafter_gib > 0.5
    assert drafter.max_total_num_tokens < verifier.max_total_num_tokens
    assert "of the drafter's cache" in drafter.reasons[0]
    assert drafter.estimated == ("the drafter, from the verifier's configuration",)
    own = DrafterInputs(config=published("llama_31_8b", num_hidden_layers=1, draft_vocab_size=32_000))
    assert planned("deploy", observed=OBSERVED, drafter=own).estimated == ()


def test_requests_at_once_and_token_usage_at_the_given_length() -> None:
    plan = planned(observed=OBSERVED, prompt_tokens=207, response_tokens=3793, concurrency=150)
    assert plan.concurrent_requests == 39  # about 40 in the deployment's own sum
    assert plan.expected_token_usage == pytest.approx(0.98, abs=0.01)
    idle = planned(observed=OBSERVED, prompt_tokens=207, response_tokens=3793, concurrency=4)
    assert idle.expected_token_usage == pytest.approx(0.1, abs=0.01)
    assert planned(prompt_tokens=207, response_tokens=3793, max_running_requests=8).concurrent_requests == 8
    assert planned().concurrent_requests is None


def test_short_requests_are_limited_by_what_sglang_lets_run() -> None:
    lengths = {"prompt_tokens": 1, "response_tokens": 1}
    assert planned(**lengths, context_length=262_144).concurrent_requests == 2048
    assert planned(**lengths, context_length=1024).concurrent_requests == 4096
    assert planned(**lengths, max_running_requests=5000).concurrent_requests == 5000


def test_a_request_that_the_pool_cannot_hold_is_refused() -> None:
    assert "a request does not fit" in planned(prompt_tokens=200_000, response_tokens=1).reasons[0]


def test_replicas_and_attention_groups_have_pools_of_their_own() -> None:
    one = planned(prompt_tokens=1000, response_tokens=1000)
    two = planned(prompt_tokens=1000, response_tokens=1000, data_parallel_size=2, gpus=16)
    groups = planned(prompt_tokens=1000, response_tokens=1000, attention_data_parallel_size=2)
    assert two.concurrent_requests == 2 * (one.concurrent_requests or 0)
    assert groups.weights_gib > one.weights_gib  # attention is divided among fewer ranks
    assert groups.bytes_per_token == one.bytes_per_token


def test_a_pool_is_whole_pages() -> None:
    plan = planned(page_size=64)
    assert plan.max_total_num_tokens % 64 == 0
    assert 0 <= planned().max_total_num_tokens - plan.max_total_num_tokens < 64


def test_a_capped_pool_leaves_the_rest() -> None:
    plan = planned(max_total_tokens=10_000)
    assert plan.max_total_num_tokens == 10_000
    assert plan.headroom_gib > planned().headroom_gib + 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_data_parallel_size": 3}, "attention_data_parallel_size is 3"),
        ({"expert_parallel_size": 5}, "expert_parallel_size is 5"),
        ({"pipeline_parallel_size": 100}, "pipeline_parallel_size is 100: the model has 61 layers"),
        ({"gpu_memory_gib": None}, "--gpu-memory-gib"),
        ({"observed": (ObservedPool(0.85, "auto", 200_000), ObservedPool(0.88, "auto", 100))}, "make no sense"),
    ],
)
def test_what_cannot_be_planned_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        planned(**changes)


def test_eagle3_on_a_pipeline_is_refused_and_generation_is_not() -> None:
    assert planned("deploy", pipeline_parallel_size=2, gpus=16).verdict == "refused"
    assert planned("generate", pipeline_parallel_size=2, gpus=16).verdict == "fits"


PUBLISHED_PARAMETERS = {
    "llama_31_8b": 8.03e9, "llama_31_70b": 70.6e9, "qwen3_8b": 8.19e9, "qwen3_235b_a22b": 235e9, "deepseek_v3": 671e9,
    "kimi_k25": 1.03e12, "gpt_oss_120b": 116.8e9, "minimax_m2": 230e9, "glm_45": 355e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_estimated_parameters_are_those_that_the_models_makers_give(name: str) -> None:
    estimate = estimate_weights(published(name), Ranks(8, 8), dtype="bfloat16")
    assert estimate.parameters == pytest.approx(PUBLISHED_PARAMETERS[name], rel=0.03)


def test_int4_experts_weigh_what_the_checkpoint_does() -> None:
    estimate = estimate_weights(KIMI, Ranks(8, 8), dtype="bfloat16")
    assert estimate.total_bytes / GIB == pytest.approx(554, rel=0.005)
    assert estimate.rank_bytes / GIB == pytest.approx(72.33, rel=0.01)  # as observed, with what loading leaves


@pytest.mark.parametrize("name", bundled_names())
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_ranks_together_hold_the_model_and_no_rank_more_than_all(name: str, tensor: int, stages: int) -> None:
    estimate = estimate_weights(published(name), Ranks(tensor, tensor, stages), dtype="bfloat16")
    assert estimate.rank_bytes * tensor * stages >= 0.97 * estimate.total_bytes
    assert estimate.rank_bytes <= 1.01 * estimate.total_bytes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("kimi_k25", {"n_routed_experts": -1}, "n_routed_experts is -1"),
        ("kimi_k25", {"moe_intermediate_size": "2048"}, "moe_intermediate_size is '2048'"),
        ("llama_31_8b", {"vocab_size": ...}, "vocab_size is missing"),
        ("llama_31_8b", {"intermediate_size": math.nan}, "intermediate_size is nan"),
        ("llama_31_8b", {"quantization_config": {"quant_method": "magic"}}, "quant_method is 'magic'"),
        ("llama_31_8b", {"quantization_config": {"quant_method": ["fp8"]}}, r"quant_method is \['fp8'\]"),
        (
            "llama_31_8b",
            {"quantization_config": {"quant_method": "gptq", "bits": 0}},
            "of the weights is 0",
        ),
        ("gpt_oss_120b", {"num_local_experts": None}, "number of experts is missing.*num_local_experts"),
        ("qwen3_235b_a22b", {"num_experts": None}, "number of experts is missing"),
        ("qwen3_8b", {"head_dim": None}, "head_dim is missing"),
        ("gpt_oss_120b", {"head_dim": None}, "head_dim is missing"),
        ("llama_31_8b", {"quantization_config": "int4"}, "quantization_config is 'int4'"),
    ],
)
def test_a_field_of_the_weights_that_makes_no_sense_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        estimate_weights(published(name, **changes), Ranks(1, 1), dtype="bfloat16")


NONSENSE = st.sampled_from(
    [None, "", "8", True, False, -1, 0, 1, 2.5, math.nan, math.inf, [], [1], ["x"], {}, {"a": 1}, 8]
)
QUANTISED = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(["fp8", "gptq", "awq", "compressed-tensors", "mxfp4", None, 3])},
    optional=dict.fromkeys(
        ("bits", "group_size", "weight_block_size", "config_groups", "ignore", "modules_to_not_convert"), NONSENSE
    ),
)


@given(
    name=st.sampled_from(bundled_names()),
    changes=st.dictionaries(
        st.sampled_from(sorted({field for name in bundled_names() for field in published(name).fields})),
        NONSENSE,
        max_size=3,
    ),
    quantised=st.none() | QUANTISED | NONSENSE,
    vision=st.none() | NONSENSE,
)
def test_whatever_a_configuration_holds_its_weights_are_a_number_or_our_error(
    name: str, changes: dict[str, Any], quantised: Any, vision: Any
) -> None:
    config = published(name, **{**changes, "quantization_config": quantised})
    config = ModelConfig(config.where, config.fields, {**config.outer, "vision_config": vision})
    try:
        estimate = estimate_weights(config, Ranks(8, 8), dtype="bfloat16")
    except BadInput as error:
        assert str(error).startswith("config.json")
        assert "\n" not in str(error)
    else:
        assert 0 < estimate.rank_bytes < math.inf


def test_weights_on_disk_are_those_of_the_index_or_of_the_files(tmp_path: Any) -> None:
    assert weights_on_disk(tmp_path) is None
    verifier = PROJECT_ROOT / "demo" / "tiny_verifier"
    assert weights_on_disk(verifier) == (verifier / "model.safetensors").stat().st_size
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 1000}, "weight_map": {}}')
    assert weights_on_disk(tmp_path) == 1000
    index.write_text('{"metadata": {"total_size": -1}}')
    with pytest.raises(BadInput, match=r"metadata\.total_size is -1"):
        weights_on_disk(tmp_path)


def test_files_that_stand_for_weights_are_not_planned_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 4000000000\n")
    with pytest.raises(BadInput, match=r"model\.safetensors: a Git LFS pointer .*; get the checkpoint's files again"):
        weights_on_disk(tmp_path)


def test_graphs_are_sglangs_own_sum_scaled_to_what_was_measured() -> None:
    fields: dict[str, Any] = {
        "gpu_memory_gib": 94.04, "tensor_ranks": 8, "stages": 1, "attention_groups": 1, "latent": True,
        "prefill_graphs": True, "drafter": False, "chunked_prefill_size": None, "largest_batch": None,
        "max_running_requests": None,
    }  # fmt: skip
    reference = count_buffers(**fields)
    assert (reference.largest_batch, reference.chunked_prefill_size) == (512, 8192)
    assert reference.graphs_gib == pytest.approx(6.58 - 0.8, abs=0.01)
    assert count_buffers(**{**fields, "max_running_requests": 64}).largest_batch == 64
    assert count_buffers(**{**fields, "attention_groups": 8}).graphs_gib > 2 * reference.graphs_gib
    assert count_buffers(**{**fields, "gpu_memory_gib": 22.0, "tensor_ranks": 1}).largest_batch == 48


def test_the_suggestion_is_the_largest_that_fits_every_phase_and_never_quantises() -> None:
    asked = kimi(
        observed=OBSERVED, kv_cache_dtype="fp8_e4m3", host_ram_gb=445, host_loading_gb=40, prompt_tokens=207,
        response_tokens=3793,
    )  # fmt: skip
    best = suggest(asked, PHASES)
    assert best is not None
    assert (best.mem_fraction_static, best.hicache_size_gb_per_rank) == (0.88, 48)
    assert best.max_total_num_tokens == pytest.approx(159_277, rel=1e-3)
    assert best.concurrency == 78
    generate = suggest(asked, ("generate",))
    assert generate is not None
    assert generate.mem_fraction_static == 0.9
    assert plan_memory(kimi(mem_fraction_static=0.91, observed=OBSERVED), "generate").verdict == "tight"
    assert suggest(kimi(gpu_memory_gib=40.0), ("generate",)) is None
    with pytest.raises(BadInput, match="device is cpu"):
        suggest(kimi(device="cpu"), ("generate",))


@given(
    name=st.sampled_from(bundled_names()),
    phase=st.sampled_from(PHASES),
    fraction=st.floats(0.01, 0.99),
    memory=st.floats(1, 300),
    sizes=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 5),
    kind=st.sampled_from([None, *KV_DTYPE_BYTES]),
    page=st.sampled_from([None, 1, 16, 64, 256]),
    length=st.none() | st.floats(1, 100_000),
    hicache=st.none() | st.integers(1, 500),
)
def test_whatever_is_asked_the_sums_add_up_and_the_verdict_follows(
    name: str, phase: Phase, fraction: float, memory: float, sizes: tuple[int, ...], kind: str | None,
    page: int | None, length: float | None, hicache: int | None,
) -> None:  # fmt: skip
    tensor, data, groups, stages, experts = sizes
    inputs = PlanInputs(
        config=published(name), mem_fraction_static=fraction, gpu_memory_gib=memory, tensor_parallel_size=tensor,
        data_parallel_size=data, attention_data_parallel_size=groups, pipeline_parallel_size=stages,
        expert_parallel_size=experts, kv_cache_dtype=kind or "auto", page_size=page, prompt_tokens=length,
        response_tokens=length, hicache_size_gb_per_rank=hicache, host_ram_gb=449,
    )  # fmt: skip
    try:
        plan = plan_memory(inputs, phase)
    except PlanRefused as error:
        assert "expected a divisor" in str(error) or "cannot be shared" in str(error)
        return
    held = plan.weights_gib + plan.drafter_gib + plan.kv_pool_gib
    assert plan.max_total_num_tokens * plan.bytes_per_token == pytest.approx(plan.kv_pool_gib * GIB)
    assert plan.max_total_num_tokens % (page or 1) == 0
    if plan.max_total_num_tokens:
        assert held <= memory * fraction + 1e-6
    if plan.verdict == "fits":
        assert plan.headroom_gib >= 3
        assert plan.max_total_num_tokens > 0
        assert kind in (None, "bf16", "bfloat16")
        assert plan.hicache_gb_per_rank <= (plan.hicache_safe_gb_per_rank or 0)
    assert plan.reasons
    assert all("\n" not in reason for reason in plan.reasons)
