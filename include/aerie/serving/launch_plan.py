"""The memory plan of a server about to be launched, on the machine that it is launched on.

The same arithmetic as everywhere (``planning.plan_memory``), where the GPUs are: a control host may not see them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aerie.artefacts.observations import Observation, read_observations
from aerie.serving.calibration import STARTUP_BYTES
from aerie.serving.errors import PlanRefused
from aerie.serving.headroom import GIB
from aerie.serving.host import Gpu
from aerie.serving.model_config import read_model_config
from aerie.serving.plan import ServerPlan
from aerie.serving.plan_inputs import DrafterInputs, ObservedPool, PlanInputs
from aerie.serving.planning import plan_memory
from aerie.serving.weights import weights_on_disk

SAME_NAMES = frozenset(
    {
        "dtype", "device", "tensor_parallel_size", "data_parallel_size", "attention_data_parallel_size",
        "pipeline_parallel_size", "expert_parallel_size", "mem_fraction_static", "kv_cache_dtype",
        "allow_quantised_kv", "context_length", "page_size", "max_total_tokens", "max_running_requests",
        "chunked_prefill_size", "cuda_graph_max_batch_size", "hicache_size_gb_per_rank",
    }
)  # fmt: skip
"""Fields of a server's plan that the memory plan is made from, under the same names."""


def free_memory_gib(gpus: Sequence[Gpu]) -> float:
    """What the smallest of some GPUs has free before a server loads, when nothing else holds it."""
    return (min(gpu.total_bytes for gpu in gpus) - STARTUP_BYTES["cuda"]) / GIB


def believing(inputs: PlanInputs, observations: Sequence[Observation]) -> PlanInputs:
    """The inputs with what launches of the same model, divided in the same way, reported on GPUs like these."""
    same = [
        one
        for one in observations
        if not one.was_capped
        and one.drafter_identity is None
        and one.device == inputs.device == "cuda"
        and one.dtype == inputs.dtype
        and one.sglang_version == observations[-1].sglang_version
        and (one.tensor_parallel_size, one.attention_data_parallel_size, one.pipeline_parallel_size)
        == (inputs.tensor_parallel_size, inputs.attention_data_parallel_size, inputs.pipeline_parallel_size)
    ]
    if not same:
        return inputs
    memory = (same[-1].memory_before_launch_bytes - STARTUP_BYTES["cuda"]) / GIB
    pools = [ObservedPool(one.mem_fraction_static, one.kv_cache_dtype, one.max_total_num_tokens) for one in same]
    return replace(inputs, gpu_memory_gib=memory, observed=tuple(pools))


def require_gpus_hold(plan: ServerPlan, gpus: Sequence[Gpu], *, folder: Path) -> None:
    """Refuse to launch what these GPUs cannot hold; the host's memory is checked apart.

    Raises:
        PlanRefused: the plan is refused; the message has the sums.
        BadInput: the checkpoint's configuration cannot be planned with, or earlier launches cannot be read.
    """
    drafter = DrafterInputs(config=read_model_config(plan.drafter.path)) if plan.drafter else DrafterInputs()
    inputs = PlanInputs(
        config=read_model_config(plan.model_path),
        gpus=len(gpus),
        gpu_memory_gib=free_memory_gib(gpus),
        weights_bytes=weights_on_disk(plan.model_path),
        drafter=drafter,
        **plan.model_dump(include=set(SAME_NAMES) - {"hicache_size_gb_per_rank"}),
    )
    earlier = [one for one in read_observations(folder) if one.model_identity == plan.model_identity]
    memory = plan_memory(believing(inputs, earlier), plan.phase)
    if memory.verdict == "refused":
        raise PlanRefused(f"the {plan.phase} server cannot be launched here: {'; '.join(memory.reasons)}")
