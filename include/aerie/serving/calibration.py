"""How many tokens a server's KV pool will hold, from memory read just before its launch. Pure arithmetic.

SGLang 0.5.23 sizes the pool so, on CUDA and on a CPU alike (``srt/mem_cache/kv_cache_configurator.py``,
``_profile_available_bytes``; ``srt/model_executor/pool_configurator.py``, ``DefaultPoolConfigurator``)::

    pool bytes = after - before * (1 - mem_fraction_static)
    tokens     = floor(pool bytes / bytes per token), rounded down to whole pages, at most max_total_tokens

``before`` is the memory that is free when the ranks have joined and no weight is loaded
(``srt/distributed/bootstrap.py``, ``measure_pre_model_load_memory``), ``after`` what is free when the weights are, the
drafter's too; each is the least of all ranks. Free is what ``torch.cuda.mem_get_info`` says, and on a CPU
``psutil.virtual_memory().available``, or what the memory cgroup leaves, by NUMA node (``srt/utils/common.py``,
``get_available_gpu_memory``). With a drafter, bytes per token are those of its layers too.

What is read before the launch, ``launch``, is more than ``before`` by what the processes take as they start, and
``after`` less than ``before`` by the weights and what else loading leaves. So::

    tokens = floor((mem_fraction_static * (launch - startup) - static) / bytes per token)

which is ``memory.PoolLine`` with ``pool_bytes = launch - startup``. ``startup`` and ``static`` are one model's on one
host: estimated for a first launch, and told by observations after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

from aerie.artefacts.observations import Observation, PlannedLaunch
from aerie.serving.errors import PlanRefused
from aerie.serving.memory import PoolLine

TOLERANCE = 0.01
"""A report that differs by more than this share from the prediction is told to a person."""

MIB, GIB = 1 << 20, 1 << 30

STARTUP_BYTES = {"cuda": round(1.55 * GIB), "cpu": 1360 * MIB}
"""A first guess of what the processes take before a weight is loaded. On CUDA the context and NCCL: a GPU of 95.59 GiB
had so much less free when a rank of the reference deployment began to load. On a CPU three Python processes with SGLang
0.5.23 and PyTorch, measured."""

LOADING_BYTES = {"cuda": round(0.49 * GIB), "cpu": 36 * MIB}
"""A first guess of what a rank holds besides its weights when the pool is sized. On CUDA that of the reference
deployment, 72.33 - 71.84 GiB; on a CPU modules that are imported meanwhile, measured."""

LEAST_SPREAD = {"cuda": 0.01, "cpu": 0.1}
"""How far apart the fractions of two observations must lie to tell ``startup`` too. A CPU's memory is everybody's, and
its readings differ by some 10 MiB, of which closer fractions would make a slope."""

TAKEN_WORTH_TELLING_BYTES = 64 * MIB

CPU_SPARE_BYTES = 2 * GIB
"""What a server without ``max_total_tokens`` must leave of the host's memory to everything else."""


@dataclass(frozen=True)
class Overheads:
    """What of a rank's memory is not KV pool, in bytes: taken before the weights are loaded, and from there on."""

    startup_bytes: float
    static_bytes: float


def first_guess(device: str, weights_bytes: float) -> Overheads:
    """Overheads of a launch of which nothing was observed; ``weights_bytes`` are those of one rank."""
    return Overheads(STARTUP_BYTES[device], weights_bytes + LOADING_BYTES[device])


def calibrated(guess: Overheads, launch: PlannedLaunch, observations: Sequence[Observation]) -> Overheads:
    """Overheads as earlier launches of the same server tell them, oldest first; of each fraction the latest.

    One observation, or several at about the same fraction, correct ``static_bytes``, and leave ``startup_bytes`` as it
    was guessed; from two that lie apart the line through them gives both.
    """
    same = (one for one in observations if not one.was_capped and one.is_of_same_server(launch))
    told = {one.mem_fraction_static: one for one in same}.values()
    if not told:
        return guess
    fractions = [one.mem_fraction_static for one in told]
    beside_pool = [
        one.mem_fraction_static * one.undisturbed.memory_before_launch_bytes - one.pool_bytes for one in told
    ]
    if max(fractions) - min(fractions) >= LEAST_SPREAD[launch.device]:
        slope, intercept = linear_regression(fractions, beside_pool)
        return Overheads(startup_bytes=slope, static_bytes=intercept)
    corrected = [rest - fraction * guess.startup_bytes for fraction, rest in zip(fractions, beside_pool, strict=True)]
    return Overheads(guess.startup_bytes, median(corrected))


def predict_tokens(launch: PlannedLaunch, overheads: Overheads) -> int:
    """``max_total_num_tokens`` that the server will report; 0 where the weights leave no room."""
    line = PoolLine(
        pool_bytes=launch.memory_before_launch_bytes - overheads.startup_bytes, static_bytes=overheads.static_bytes
    )
    tokens = max(0, line.tokens(launch.mem_fraction_static, launch.bytes_per_token))
    if launch.max_total_tokens is not None:
        tokens = min(tokens, launch.max_total_tokens)
    return tokens // launch.page_size * launch.page_size


def require_host_spares(launch: PlannedLaunch, overheads: Overheads) -> None:
    """Refuse a CPU server whose pool has no cap and would take memory that the machine needs.

    Raises:
        PlanRefused: it would leave too little; the message shows the sum.
    """
    if launch.device != "cpu" or launch.max_total_tokens is not None:
        return
    available = launch.memory_before_launch_bytes
    share = launch.mem_fraction_static * (available - overheads.startup_bytes)
    left = available - overheads.startup_bytes - share
    if left < CPU_SPARE_BYTES:
        processes = overheads.startup_bytes / GIB
        raise PlanRefused(
            f"mem_fraction_static {launch.mem_fraction_static:g} without max_total_tokens: of {available / GIB:.1f} "
            f"GiB available the server's processes take {processes:.1f}, weights and KV pool {share / GIB:.1f}, which "
            f"leaves {left / GIB:.1f} GiB: expected at least {CPU_SPARE_BYTES / GIB:g}; lower "
            "serving.mem_fraction_static, or set serving.max_total_tokens"
        )


def deviation(observation: Observation) -> str | None:
    """What a person should be told when the server's pool is not the predicted one, None where it is."""
    predicted, reported = observation.predicted_max_total_num_tokens, observation.max_total_num_tokens
    if abs(predicted - reported) <= TOLERANCE * reported:
        return None
    off = (predicted - reported) / reported
    taken = observation.taken_by_others_bytes
    others = (
        f"; other processes took {taken / GIB:+.2f} GiB meanwhile" if abs(taken) > TAKEN_WORTH_TELLING_BYTES else ""
    )
    return (
        f"planned {predicted:,} KV tokens, the server says {reported:,}, off by {off:+.1%} (mem_fraction_static "
        f"{observation.mem_fraction_static:g}, {observation.memory_before_launch_bytes / GIB:.2f} GiB free before the "
        f"launch{others}): the next plan uses what the server says"
    )
