"""Command lines phase by phase, and the plans that are refused."""

import argparse
import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from aerie.serving.plan import CPU_STAND_IN, INCLUDE, WITH_DRAFTER, DrafterPlan, ServerPlan, checkpoint_identity
from aerie.serving.probing import Probing

Make = Callable[..., ServerPlan]
PYTHON = Path("/envs/serve/bin/python")
HOOKS = ({"name": "capture", "target_modules": ["model.norm"], "hook_factory": "somewhere:factory", "config": {}},)
DRAFTER = DrafterPlan(path=Path("/models/drafter"), identity="drafter-1")
CPU = {"device": "cpu", "dtype": "float32", "max_total_tokens": 65_536, "mem_fraction_static": 0.1}
COMMON = [
    "--model-path", "/models/verifier", "--host", "127.0.0.1", "--port", "8000", "--dtype", "bfloat16",
    "--kv-cache-dtype", "auto", "--mem-fraction-static", "0.88", "--tensor-parallel-size", "8",
    "--context-length", "4096", "--enable-metrics",
]  # fmt: skip
GPU = [str(PYTHON), "-m", "sglang.launch_server"]


def command(plan: ServerPlan) -> list[str]:
    return plan.command_line(PYTHON, port=8000)


def test_generation_on_gpus(make_plan: Make) -> None:
    plan = make_plan(tensor_parallel_size=8, hicache_size_gb_per_rank=48, extra_arguments=("--watchdog-timeout", "600"))
    assert command(plan) == [
        *GPU, *COMMON, "--enable-hierarchical-cache", "--hicache-size", "48", "--watchdog-timeout", "600"
    ]  # fmt: skip


def test_every_optional_setting_has_its_flag(make_plan: Make) -> None:
    plan = make_plan(
        revision="abc",
        trust_remote_code=True,
        max_total_tokens=1000,
        chunked_prefill_size=2048,
        max_running_requests=64,
    )
    given = " ".join(command(plan))
    for flag in (
        "--revision abc", "--trust-remote-code", "--max-total-tokens 1000", "--chunked-prefill-size 2048",
        "--max-running-requests 64",
    ):  # fmt: skip
        assert flag in given


def test_parallel_sizes_pages_and_graphs_have_their_flags_and_stay_out_where_they_are_not_used(make_plan: Make) -> None:
    plan = make_plan(
        tensor_parallel_size=8,
        data_parallel_size=2,
        attention_data_parallel_size=4,
        pipeline_parallel_size=2,
        expert_parallel_size=8,
        page_size=64,
        cuda_graph_max_batch_size=160,
    )
    given = " ".join(command(plan))
    for flag in (
        "--data-parallel-size 2", "--attention-data-parallel-size 4", "--pipeline-parallel-size 2",
        "--expert-parallel-size 8", "--page-size 64", "--cuda-graph-max-bs-decode 160", "--disable-overlap-schedule",
    ):  # fmt: skip
        assert flag in given
        assert flag.partition(" ")[0] not in command(make_plan())


def test_capture_recomputes_everything_eagerly_and_hooks_fire(make_plan: Make) -> None:
    plan = make_plan(phase="capture", forward_hooks=HOOKS, tensor_parallel_size=8, hicache_size_gb_per_rank=48)
    assert command(plan) == [
        *GPU, *COMMON, "--forward-hooks", json.dumps(list(HOOKS)), "--disable-radix-cache",
        "--cuda-graph-backend-prefill", "disabled", "--enforce-disable-flashinfer-allreduce-fusion",
    ]  # fmt: skip


def test_states_of_what_is_generated_are_seen_in_every_step_and_keep_the_cache(make_plan: Make) -> None:
    plan = make_plan(forward_hooks=HOOKS, tensor_parallel_size=8, hicache_size_gb_per_rank=48)
    assert command(plan) == [
        *GPU, *COMMON, "--forward-hooks", json.dumps(list(HOOKS)), "--enable-priority-scheduling",
        "--disable-priority-preemption", "--cuda-graph-backend-prefill", "disabled",
        "--cuda-graph-backend-decode", "disabled", "--enforce-disable-flashinfer-allreduce-fusion",
        "--enable-hierarchical-cache", "--hicache-size", "48",
    ]  # fmt: skip


def test_capture_on_one_rank_has_no_fusion_to_disable(make_plan: Make) -> None:
    assert "--enforce-disable-flashinfer-allreduce-fusion" not in command(
        make_plan(phase="capture", forward_hooks=HOOKS)
    )


def test_benchmark_serves_eagle3_and_never_eagle(make_plan: Make) -> None:
    plan = make_plan(phase="benchmark", drafter=DRAFTER, tensor_parallel_size=8)
    assert command(plan) == [
        *GPU, *COMMON, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/models/drafter",
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    ]  # fmt: skip
    assert "EAGLE" not in command(plan)


def test_benchmark_without_a_drafter_is_the_baseline(make_plan: Make) -> None:
    assert command(make_plan(phase="benchmark", tensor_parallel_size=8)) == [*GPU, *COMMON]


def test_deployment_serves_as_the_benchmark_did(make_plan: Make) -> None:
    benchmark, deployed = (make_plan(phase=phase, drafter=DRAFTER) for phase in ("benchmark", "deploy"))
    assert command(deployed) == command(benchmark)


def test_cpu_starts_the_stand_ins_launcher(make_plan: Make) -> None:
    plan = make_plan(**CPU)
    arguments = command(plan)
    assert arguments[:2] == [str(PYTHON), str(CPU_STAND_IN / "launch_server.py")]
    assert Path(arguments[1]).exists()
    assert arguments[arguments.index("--device") :] == [
        "--device", "cpu", "--attention-backend", "torch_native", "--prefill-attention-backend", "intel_amx",
        "--decode-attention-backend", "intel_amx", "--cuda-graph-backend-prefill", "disabled",
        "--cuda-graph-backend-decode", "disabled", "--disable-overlap-schedule", "--sleep-on-idle",
    ]  # fmt: skip
    assert plan.environment() == {
        "PYTHONPATH": f"{CPU_STAND_IN}{os.pathsep}{INCLUDE}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def test_capture_on_a_cpu_names_each_flag_once(make_plan: Make) -> None:
    arguments = command(make_plan(phase="capture", forward_hooks=HOOKS, **CPU))
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert len(flags) == len(set(flags))


def test_gpu_server_sees_the_project_and_not_the_stand_in(make_plan: Make) -> None:
    assert make_plan().environment()["PYTHONPATH"] == str(INCLUDE)
    assert "SGLANG_USE_CPU_ENGINE" not in make_plan().environment()


@pytest.mark.parametrize("phase", ["generate", "capture", "benchmark"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_phase_has_a_parser(make_plan: Make, phase: str, device: str) -> None:
    changes: dict[str, Any] = dict(CPU) if device == "cpu" else {}
    plan = make_plan(phase=phase, forward_hooks=HOOKS if phase == "capture" else (), **changes)
    assert not {"--reasoning-parser", "--tool-call-parser"} & set(command(plan))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drafter": DRAFTER}, "phase generate has a drafter"),
        ({"phase": "capture", "forward_hooks": HOOKS, "drafter": DRAFTER}, "phase capture has a drafter"),
        ({"phase": "capture"}, "phase capture with 0 forward hooks"),
        ({"phase": "benchmark", "forward_hooks": HOOKS}, "phase benchmark with 1 forward hooks"),
        (
            {"forward_hooks": HOOKS, "data_parallel_size": 2},
            "data_parallel_size is 2 with hidden_states",
        ),
        ({"kv_cache_dtype": "fp8_e4m3"}, "changes what the verifier writes"),
        ({"model_path": Path("models/verifier")}, "expected an absolute path"),
        ({"extra_arguments": ("--reasoning-parser", "kimi_k2")}, "--reasoning-parser is decided by the plan"),
        ({"extra_arguments": ("--reasoning-p=kimi_k2",)}, "--reasoning-parser is decided by the plan"),
        ({"extra_arguments": ("--speculative-algorithm", "EAGLE")}, "--speculative-algorithm is decided by the plan"),
        ({**CPU, "hicache_size_gb_per_rank": 4}, "pins host memory through CUDA"),
        ({**CPU, "tensor_parallel_size": 2}, "on a CPU it must be 1"),
        ({**CPU, "data_parallel_size": 2}, "data_parallel_size is 2: on a CPU it must be 1"),
        ({**CPU, "cuda_graph_max_batch_size": 8}, "a CPU has no CUDA graphs"),
        ({"phase": "deploy"}, "phase deploy has no drafter"),
        ({"attention_data_parallel_size": 2}, "expected a divisor of tensor_parallel_size 1"),
        ({"tensor_parallel_size": 8, "expert_parallel_size": 3}, "expert_parallel_size is 3"),
        ({"phase": "benchmark", "drafter": DRAFTER, "pipeline_parallel_size": 2}, "one pipeline stage only"),
        ({"page_size": 64, "chunked_prefill_size": 100}, "expected a multiple of page_size 64"),
        ({"extra_arguments": ("--dp", "2")}, "--data-parallel-size|--dp-size is decided by the plan"),
        ({"mem_fraction_static": 1.0}, "less than 1"),
        ({"surprise": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(make_plan: Make, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        make_plan(**changes)


def test_quantised_kv_needs_a_recorded_reason(make_plan: Make) -> None:
    plan = make_plan(kv_cache_dtype="fp8_e4m3", allow_quantised_kv="measured: no difference on the canary")
    assert "fp8_e4m3" in command(plan)


def test_a_chain_whose_length_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"a chain .* of 3 steps has 4"):
        DrafterPlan(path=Path("/d"), identity="1", num_steps=3, num_draft_tokens=5)
    DrafterPlan(path=Path("/d"), identity="1", num_steps=3, eagle_topk=2, num_draft_tokens=8)


def test_identity_is_what_affects_the_server_and_not_where_it_listens(make_plan: Make, probing: Probing) -> None:
    plan = make_plan()
    assert make_plan(host="10.0.0.1", port=9, probing=probing).fingerprint() == plan.fingerprint()
    for changes in (
        {"model_identity": "verifier-2"}, {"dtype": "float16"}, {"phase": "benchmark"}, {"mem_fraction_static": 0.85},
        {"extra_arguments": ("--watchdog-timeout", "600")},
    ):  # fmt: skip
        assert make_plan(**changes).fingerprint() != plan.fingerprint()


def test_a_retrained_drafter_is_another_server(make_plan: Make) -> None:
    retrained = DRAFTER.model_copy(update={"identity": "drafter-2"})
    one, other = (make_plan(phase="benchmark", drafter=drafter) for drafter in (DRAFTER, retrained))
    assert one.fingerprint() != other.fingerprint()


def test_plan_survives_json(make_plan: Make) -> None:
    plan = make_plan(phase="capture", forward_hooks=HOOKS)
    again = ServerPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()


def test_checkpoint_identity_sees_new_weights_and_new_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = checkpoint_identity(tmp_path)
    assert checkpoint_identity(tmp_path) == first
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    second = checkpoint_identity(tmp_path)
    (tmp_path / "config.json").write_text('{"changed": true}')
    assert len({first, second, checkpoint_identity(tmp_path)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", ["generate", "capture", "benchmark", "deploy"])
def test_sglang_itself_takes_the_arguments(
    make_plan: Make, monkeypatch: pytest.MonkeyPatch, device: str, phase: str
) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is in the serve environment")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.syspath_prepend(str(CPU_STAND_IN))
    importlib.import_module("launch_server")
    from sglang.srt.server_args import ServerArgs

    changes: dict[str, Any] = dict(CPU)
    if device == "cuda":
        sizes = ("tensor", "data", "attention_data", "expert") + (
            ("pipeline",) if phase in ("generate", "capture") else ()
        )
        changes = {f"{name}_parallel_size": 8 for name in sizes}
        changes |= {"hicache_size_gb_per_rank": 48, "page_size": 64, "cuda_graph_max_batch_size": 160}
    plan = make_plan(
        phase=phase,
        drafter=DRAFTER if phase in WITH_DRAFTER else None,
        forward_hooks=HOOKS if phase == "capture" else (),
        chunked_prefill_size=2048,
        max_running_requests=64,
        revision="abc",
        trust_remote_code=True,
        **changes,
    )
    arguments = command(plan)
    arguments = [*arguments[arguments.index("--model-path") :], "--served-model-name", "launch-1"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    assert parsed.reasoning_parser is None
    assert parsed.tool_call_parser is None
    assert parsed.served_model_name == "launch-1"
