"""Predicting a launch, and what it turned out to hold: reads what ``calibration`` computes with."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from aerie.artefacts.observations import Observation, PlannedLaunch, read_observations
from aerie.serving.attention import attention_of, kv_dtype_bytes
from aerie.serving.calibration import GIB, Overheads, calibrated, first_guess, predict_tokens, require_host_spares
from aerie.serving.checkpoint_files import weights_bytes
from aerie.serving.errors import PlanRefused
from aerie.serving.host import host_facts
from aerie.serving.host_memory import OtherProcesses, settled_available_bytes
from aerie.serving.launch import Launched
from aerie.serving.model_config import ModelConfig, read_model_config
from aerie.serving.plan import ServerPlan
from aerie.serving.probe import ReadyServer
from aerie.serving.weights import DTYPE_BYTES, Ranks, estimate_weights


@dataclass(frozen=True)
class Prediction:
    """What a launch is expected to hold."""

    launch: PlannedLaunch
    tokens: int

    @property
    def text(self) -> str:
        """For people: the prediction, and what it comes from."""
        launch = self.launch
        return (
            f"KV pool planned: {self.tokens:,} tokens of {launch.bytes_per_token:,} bytes, at mem_fraction_static "
            f"{launch.mem_fraction_static:g} with {launch.memory_before_launch_bytes / GIB:.2f} GiB free"
        )


def predict_launch(plan: ServerPlan, folder: Path) -> Prediction:
    """Read the machine's memory now, and predict the launch that comes next, from earlier ones of the folder too.

    Raises:
        PlanRefused: the planner does not know the attention, or the host cannot spare what the plan takes.
        BadInput: the checkpoint's files, or those of earlier launches, cannot be read.
        Failed: NVML does not answer.
    """
    config = read_model_config(plan.model_path)
    earlier = read_observations(folder)
    facts = host_facts()
    memory, gpu_name = settled_available_bytes(), None
    if plan.device == "cuda":
        gpus = facts.gpus[: plan.ranks]
        if len(gpus) < plan.ranks:
            raise PlanRefused(f"the plan has {plan.ranks} ranks, but host {facts.hostname} has {len(facts.gpus)} GPUs")
        memory, gpu_name = min(gpu.total_bytes - gpu.used_bytes for gpu in gpus), gpus[0].name
    launch = PlannedLaunch(
        plan_fingerprint=plan.fingerprint(),
        model_identity=plan.model_identity,
        drafter_identity=plan.drafter.identity if plan.drafter else None,
        hostname=facts.hostname,
        gpu_name=gpu_name,
        sglang_version=version("sglang"),
        device=plan.device,
        dtype=plan.dtype,
        kv_cache_dtype=plan.kv_cache_dtype,
        tensor_parallel_size=plan.tensor_parallel_size,
        data_parallel_size=plan.data_parallel_size,
        attention_data_parallel_size=plan.attention_data_parallel_size,
        pipeline_parallel_size=plan.pipeline_parallel_size,
        expert_parallel_size=plan.expert_parallel_size,
        mem_fraction_static=plan.mem_fraction_static,
        max_total_tokens=plan.max_total_tokens,
        page_size=plan.page_size or 1,
        bytes_per_token=_token_bytes(plan, config),
        memory_before_launch_bytes=memory,
    )
    overheads: Overheads = calibrated(first_guess(plan.device, _weights_per_rank(plan, config)), launch, earlier)
    require_host_spares(launch, overheads)
    return Prediction(launch=launch, tokens=predict_tokens(launch, overheads))


@contextmanager
def others_watched(prediction: Prediction, launched: Launched) -> Iterator[Callable[[], int]]:
    """While the server starts: what other processes take of a CPU's memory; 0 on GPUs, which are its own."""
    launch = prediction.launch
    if launch.device == "cuda":
        yield lambda: 0
        return
    with OtherProcesses(launched.identity, launched.log.path, launch.memory_before_launch_bytes) as others:
        yield lambda: others.taken.as_before_launch(launch.mem_fraction_static)


def observe(
    prediction: Prediction, ready: ReadyServer, launch_token: str, *, taken_by_others_bytes: int
) -> Observation:
    """What the launch turned out to hold, beside what was predicted."""
    return Observation(
        **prediction.launch.model_dump(),
        launch_token=launch_token,
        observed_at=time.time(),
        taken_by_others_bytes=taken_by_others_bytes,
        predicted_max_total_num_tokens=prediction.tokens,
        max_total_num_tokens=ready.max_total_num_tokens,
        memory_left_bytes=ready.memory_left_bytes,
    )


def _attention_ranks(plan: ServerPlan) -> int:
    return plan.tensor_parallel_size // plan.attention_data_parallel_size


def _token_bytes(plan: ServerPlan, config: ModelConfig) -> int:
    """KV bytes of one token on one rank, with the drafter's layers: SGLang counts one as it counts the verifier's."""
    attention = attention_of(config, ranks=_attention_ranks(plan))
    dtype_bytes = kv_dtype_bytes(plan.kv_cache_dtype, plan.dtype)
    token_bytes = attention.bytes_per_token(dtype_bytes, stages=plan.pipeline_parallel_size)
    if plan.drafter is None:
        return token_bytes
    drafter_layers = read_model_config(plan.drafter.path).count("num_hidden_layers")
    return token_bytes + token_bytes * drafter_layers // attention.layers


def _weights_per_rank(plan: ServerPlan, config: ModelConfig) -> float:
    """Bytes of weights on one rank: the verifier's fullest rank, and a drafter as if all of it were divided."""
    ranks = Ranks(
        tensor=plan.tensor_parallel_size, attention=_attention_ranks(plan), stages=plan.pipeline_parallel_size
    )
    dtype_bytes = DTYPE_BYTES[plan.dtype]
    share = estimate_weights(config, ranks, dtype=plan.dtype).rank_share
    verifier = share * weights_bytes(plan.model_path, dtype_bytes=dtype_bytes)
    drafter = weights_bytes(plan.drafter.path, dtype_bytes=dtype_bytes) / ranks.tensor if plan.drafter else 0
    return verifier + drafter
