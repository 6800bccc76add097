"""The memory plan of a server in one phase: what is held per GPU and on the host, the sums, and a verdict.

Pure: the same function answers the command line, the pipeline's first task and the check before a launch.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from aerie.errors import BadInput
from aerie.serving.attention import Attention, attention_of, kv_dtype_bytes
from aerie.serving.calibration import LOADING_BYTES
from aerie.serving.drafter_size import DrafterSize, size_drafter
from aerie.serving.errors import PlanRefused
from aerie.serving.headroom import GIB, Buffers, count_buffers
from aerie.serving.memory import (
    LOADING_GB_PER_RANK,
    HostMemory,
    PoolLine,
    PoolRow,
)
from aerie.serving.plan import FULL_PRECISION_KV, WITH_DRAFTER, Phase
from aerie.serving.plan_inputs import ObservedPool, PlanInputs
from aerie.serving.weights import DTYPE_BYTES, Ranks, estimate_weights, expert_count

Verdict = Literal["fits", "tight", "refused"]
VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "refused")
"""From the best to the worst."""

SERVED_KV_TYPES = frozenset({"auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16"})
"""What ``--kv-cache-dtype`` of SGLang 0.5.23 takes."""

OWN_RUNNING_REQUESTS = (2048, 4096)
"""Least and most requests that SGLang 0.5.23 lets run at once in one pool, where it is not told a number."""

QUEUE_FACTOR = 2
"""Requests to keep in flight for each that can run: the reference's 150 held 72 running and 79 queued."""


OBSERVED_TOLERANCE = 0.02
"""Observations lie on one line: the reference deployment's four do within 0.1 %."""
MEMORY_TOLERANCE = 0.05
"""The memory that observations tell of is what a GPU has free before the server loads, to a GiB or two."""
WEIGHTS_FACTOR = 2.0
"""What observations tell of the weights holds all that stays after loading, and kernels may repack them."""


@dataclass(frozen=True)
class Sum:
    """One line of a plan: what, how much, and the arithmetic behind it."""

    name: str
    amount: str
    arithmetic: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """A server in one phase. GiB are per GPU; ``max_total_num_tokens`` is of one pool, as SGLang reports it.

    ``weights_gib`` are what a rank holds of the verifier, from observations with all that stays after loading.
    ``headroom_gib`` is left after graphs and buffers, for activations. ``concurrent_requests`` are of all pools.
    ``estimated`` names the figures that were neither given nor measured.
    """

    phase: Phase
    verdict: Verdict
    reasons: tuple[str, ...]
    bytes_per_token: int
    max_total_num_tokens: int
    weights_gib: float
    drafter_gib: float
    kv_pool_gib: float
    graphs_gib: float
    headroom_gib: float
    gpu_memory_gib: float
    concurrent_requests: int | None
    expected_token_usage: float | None
    hicache_gb_per_rank: int
    hicache_gb_total: int
    hicache_safe_gb_per_rank: int | None
    host_available_gb: float | None
    host_loading_gb: float | None
    host_states_gb: float
    sums: tuple[Sum, ...]
    estimated: tuple[str, ...]


def plan_memory(inputs: PlanInputs, phase: Phase) -> MemoryPlan:
    """The memory plan of a server in ``phase``; what cannot work is ``refused``, with the sum that decides.

    Raises:
        BadInput: a field of the configuration is missing or makes no sense, or too little is given to plan with.
        PlanRefused: the attention or the KV type is not known, or the heads cannot be shared by so many ranks.
    """
    _require_sizes(inputs)
    cache = _cache(inputs, phase)
    static = _static(inputs, cache)
    gpu = _gpu(inputs, phase, cache, static)
    host = _host(inputs, phase)
    concurrent = _concurrent(inputs, gpu.tokens)
    refusals = [*_refusals(inputs, cache, static, gpu), *host.refusals]
    shortage = gpu.shortage
    return MemoryPlan(
        phase=phase,
        verdict="refused" if refusals else "tight" if shortage else "fits",
        reasons=tuple(refusals) or (shortage or gpu.enough,),
        bytes_per_token=cache.bytes_per_token,
        max_total_num_tokens=gpu.tokens,
        weights_gib=static.weights_gib,
        drafter_gib=cache.drafter_gib,
        kv_pool_gib=gpu.pool_gib,
        graphs_gib=gpu.graphs_gib,
        headroom_gib=gpu.headroom_gib,
        gpu_memory_gib=static.memory_gib,
        concurrent_requests=concurrent,
        expected_token_usage=_usage(inputs, concurrent, gpu.tokens),
        hicache_gb_per_rank=host.hicache_gb,
        hicache_gb_total=host.hicache_gb * inputs.ranks,
        hicache_safe_gb_per_rank=host.safe_gb,
        host_available_gb=inputs.host_ram_gb,
        host_loading_gb=host.loading_gb,
        host_states_gb=host.states_gb,
        sums=(*static.sums, *cache.sums, *gpu.sums, *_request_sums(inputs, concurrent, gpu.tokens), *host.sums),
        estimated=(*static.estimated, *cache.estimated, *host.estimated),
    )


def _require_sizes(inputs: PlanInputs) -> None:
    tensor = inputs.tensor_parallel_size
    for name, size in (
        ("attention_data_parallel_size", inputs.attention_data_parallel_size),
        ("expert_parallel_size", inputs.expert_parallel_size),
    ):
        if tensor % size:
            raise PlanRefused(f"{name} is {size}: expected a divisor of tensor_parallel_size {tensor}")
    experts = expert_count(inputs.config)
    if experts and experts % inputs.expert_parallel_size:
        raise PlanRefused(
            f"expert_parallel_size is {inputs.expert_parallel_size}: expected a divisor of the model's {experts} "
            "experts"
        )
    layers = inputs.config.count("num_hidden_layers")
    if inputs.pipeline_parallel_size > layers:
        raise PlanRefused(f"pipeline_parallel_size is {inputs.pipeline_parallel_size}: the model has {layers} layers")


@dataclass(frozen=True)
class _Cache:
    """The KV cache: what a token takes, by the verifier and, with a drafter, by what SGLang charges for it."""

    attention: Attention
    explanation: str
    bytes_per_token: int
    drafter: DrafterSize | None
    drafter_excess_bytes: int
    """Bytes per token that the drafter's own cache takes beyond what SGLang charges for it."""
    estimated: tuple[str, ...]

    @property
    def drafter_gib(self) -> float:
        return self.drafter.weights_bytes / GIB if self.drafter else 0.0

    @property
    def sums(self) -> Iterator[Sum]:
        yield Sum("KV cache per token", f"{self.bytes_per_token:,} bytes", self.explanation)
        if self.drafter is not None:
            yield Sum("drafter", f"{self.drafter_gib:.2f} GiB", self.drafter.explanation)


def _cache(inputs: PlanInputs, phase: Phase) -> _Cache:
    attention = attention_of(inputs.config, ranks=inputs.attention_ranks)
    element_bytes = kv_dtype_bytes(inputs.kv_cache_dtype, inputs.dtype)
    stages = inputs.pipeline_parallel_size
    own = attention.bytes_per_token(element_bytes, stages=stages)
    explanation = attention.explain(element_bytes, stages=stages)
    if phase not in WITH_DRAFTER:
        return _Cache(attention, explanation, own, None, 0, ())
    # SGLang sizes the drafter's layer as one more of the verifier's, whatever the drafter's own heads are.
    charged = math.ceil(attention.elements * element_bytes)
    drafter = _drafter(inputs)
    return _Cache(
        attention=attention,
        explanation=f"{explanation}; + {charged:,} for the drafter's layer",
        bytes_per_token=own + charged,
        drafter=drafter,
        drafter_excess_bytes=max(0, math.ceil(drafter.kv_elements * element_bytes) - charged),
        estimated=() if inputs.drafter.config else ("the drafter, from the verifier's configuration",),
    )


def _drafter(inputs: PlanInputs) -> DrafterSize:
    known = inputs.drafter
    config = known.config or inputs.config
    vocabulary = known.vocabulary or config.count("draft_vocab_size", default=config.count("vocab_size"))
    return size_drafter(
        config,
        ranks=inputs.tensor_parallel_size,
        draft_vocabulary=vocabulary,
        intermediate_size=known.intermediate_size,
        dtype_bytes=DTYPE_BYTES[inputs.dtype],
    )


def require_plausible(inputs: PlanInputs) -> None:
    """Refuse observations that cannot be of this model on such GPUs: a plan made from them would be a wrong one.

    Raises:
        BadInput: they contradict each other, the memory of the GPUs, or the model's weights; the message says what.
        PlanRefused: they make no sense together at all.
    """
    if not inputs.observed:
        return
    attention = attention_of(inputs.config, ranks=inputs.attention_ranks)
    rows = [_row(inputs, attention, one) for one in inputs.observed]
    several = len({row.fraction for row in rows}) > 1
    if not several and inputs.gpu_memory_gib is None:
        return  # too little is known, which plan_memory says
    memory = (inputs.gpu_memory_gib or 0) * GIB
    line = PoolLine.through_all(rows) if several else PoolLine.calibrated(memory, rows)
    asked = "are the observations of this model on such GPUs, divided so, each with its KV type?"
    for row in rows:
        tokens = line.tokens(row.fraction, row.bytes_per_token)
        if abs(tokens - row.tokens) > OBSERVED_TOLERANCE * row.tokens:
            raise BadInput(
                f"observed {row.fraction:g}: {row.tokens:,} tokens, where all observations together make it "
                f"{tokens:,}: {asked}"
            )
    if several and memory and abs(line.pool_bytes - memory) > MEMORY_TOLERANCE * memory:
        raise BadInput(
            f"the observations are of GPUs with {line.pool_bytes / GIB:.2f} GiB, and these have "
            f"{memory / GIB:.2f} GiB: {asked}"
        )
    ranks = Ranks(inputs.tensor_parallel_size, inputs.attention_ranks, inputs.pipeline_parallel_size)
    try:
        estimate = estimate_weights(inputs.config, ranks, dtype=inputs.dtype)
    except BadInput:  # what cannot be estimated, such as an unknown quantisation, can still be observed
        return
    weights = (inputs.weights_bytes or estimate.total_bytes) * estimate.rank_share
    if not weights / WEIGHTS_FACTOR < line.static_bytes < weights * WEIGHTS_FACTOR + LOADING_BYTES[inputs.device]:
        raise BadInput(
            f"the observations make the weights {line.static_bytes / GIB:.2f} GiB on a GPU, and the configuration "
            f"makes them {weights / GIB:.2f}: {asked}"
        )


@dataclass(frozen=True)
class _Static:
    """What a rank holds before its KV pool, and the memory that the fraction is of."""

    line: PoolLine
    weights_gib: float
    sums: tuple[Sum, ...]
    estimated: tuple[str, ...]

    @property
    def memory_gib(self) -> float:
        return self.line.pool_bytes / GIB


def _static(inputs: PlanInputs, cache: _Cache) -> _Static:
    rows = [_row(inputs, cache.attention, one) for one in inputs.observed]
    memory = None if inputs.gpu_memory_gib is None else inputs.gpu_memory_gib * GIB
    if len({row.fraction for row in rows}) > 1:
        return _observed(PoolLine.through_all(rows), rows)
    if memory is None:
        raise BadInput(
            "the memory of a GPU is not known: give --gpu-memory-gib, or two observations (--observed FRACTION=TOKENS)"
        )
    if rows:
        return _observed(PoolLine.calibrated(memory, rows), rows)
    ranks = Ranks(inputs.tensor_parallel_size, inputs.attention_ranks, inputs.pipeline_parallel_size)
    estimate = estimate_weights(inputs.config, ranks, dtype=inputs.dtype)
    total = inputs.weights_bytes or estimate.total_bytes
    weights_gib = total * estimate.rank_share / GIB
    remains = LOADING_BYTES[inputs.device] / GIB
    measured = "on the reference deployment" if inputs.device == "cuda" else "on a CPU"
    source = "given or on disk" if inputs.weights_bytes else "estimated from the configuration"
    return _Static(
        line=PoolLine(pool_bytes=memory, static_bytes=(weights_gib + remains) * GIB),
        weights_gib=weights_gib,
        sums=(
            Sum(f"memory of a {_rank(inputs)}", f"{memory / GIB:.2f} GiB", "free before the server loads"),
            Sum(
                "weights",
                f"{weights_gib:.2f} GiB",
                f"{total / 1e9:,.1f} GB in all ({source}), of which {estimate.rank_share:.2%} on the fullest of "
                f"{ranks.tensor * ranks.stages} rank{'s' if ranks.tensor * ranks.stages > 1 else ''}, copies included",
            ),
            Sum("left by loading", f"{remains:.2f} GiB", f"as measured {measured}"),
        ),
        estimated=() if inputs.weights_bytes else ("the weights, from the configuration",),
    )


def _rank(inputs: PlanInputs) -> str:
    return "GPU" if inputs.device == "cuda" else "CPU's host"


def _row(inputs: PlanInputs, attention: Attention, observed: ObservedPool) -> PoolRow:
    element_bytes = kv_dtype_bytes(observed.kv_cache_dtype, inputs.dtype)
    token_bytes = attention.bytes_per_token(element_bytes, stages=inputs.pipeline_parallel_size)
    return PoolRow(observed.fraction, observed.tokens, token_bytes)


def _observed(line: PoolLine, rows: list[PoolRow]) -> _Static:
    seen = ", ".join(f"{row.fraction:g}: {row.tokens:,} x {row.bytes_per_token:,} bytes" for row in rows)
    static_gib = line.static_bytes / GIB
    return _Static(
        line=line,
        weights_gib=static_gib,
        sums=(
            Sum("memory of a GPU", f"{line.pool_bytes / GIB:.2f} GiB", f"from the observations {seen}"),
            Sum("weights", f"{static_gib:.2f} GiB", "from the same observations, with all that stays after loading"),
        ),
        estimated=(),
    )


@dataclass(frozen=True)
class _Gpu:
    """One GPU: its KV pool, and what is left beside it."""

    tokens: int
    pool_gib: float
    graphs_gib: float
    headroom_gib: float
    safe_gib: float | None
    """Least head-room; None where no rule holds (a CPU)."""
    headroom_sum: str
    sums: tuple[Sum, ...]

    @property
    def shortage(self) -> str | None:
        """Why the head-room is tight, or None."""
        if self.safe_gib is None or self.headroom_gib >= self.safe_gib:
            return None
        return (
            f"{self.headroom_gib:.2f} GiB per GPU left after graphs and buffers, less than {self.safe_gib:g}: "
            f"{self.headroom_sum}; a large prefill may run out of memory: lower the fraction, or the chunk"
        )

    @property
    def enough(self) -> str:
        """Why it fits."""
        if self.safe_gib is None:
            return f"{self.pool_gib:.2f} GiB of KV pool in what the host has free"
        return (
            f"{self.headroom_gib:.2f} GiB per GPU left after graphs and buffers, at least {self.safe_gib:g}: "
            f"{self.headroom_sum}"
        )


def _gpu(inputs: PlanInputs, phase: Phase, cache: _Cache, static: _Static) -> _Gpu:
    memory, fraction = static.memory_gib, inputs.mem_fraction_static
    static_gib = static.line.static_bytes / GIB + cache.drafter_gib
    available_gib = memory * fraction - static_gib
    tokens = _tokens(inputs, available_gib, cache.bytes_per_token)
    pool_gib = tokens * cache.bytes_per_token / GIB
    buffers = _buffers(inputs, phase, cache, memory) if inputs.device == "cuda" else None
    graphs_gib = buffers.graphs_gib if buffers else 0.0
    excess_gib = tokens * cache.drafter_excess_bytes / GIB
    left_gib = memory * (1 - fraction)
    unused_gib = max(0.0, available_gib - pool_gib) if inputs.max_total_tokens else 0.0
    headroom_gib = left_gib + unused_gib - graphs_gib - excess_gib
    headroom_sum = f"{memory:.2f} x (1 - {fraction:g})"
    headroom_sum += f" + {unused_gib:.2f} that max_total_tokens leaves unused" if unused_gib else ""
    headroom_sum += f" - {graphs_gib:.2f} graphs and buffers" if buffers else ""
    headroom_sum += f" - {excess_gib:.2f} of the drafter's cache" if excess_gib else ""
    headroom_sum += f" = {headroom_gib:.2f} GiB"
    capped = f", at most max_total_tokens {inputs.max_total_tokens:,}" if inputs.max_total_tokens else ""
    paged = f", in whole pages of {inputs.page_size}" if inputs.page_size else ""
    return _Gpu(
        tokens=tokens,
        pool_gib=pool_gib,
        graphs_gib=graphs_gib,
        headroom_gib=headroom_gib,
        safe_gib=buffers.safe_left_gib if buffers else None,
        headroom_sum=headroom_sum,
        sums=(
            Sum(
                "KV pool",
                f"{pool_gib:.2f} GiB",
                f"{memory:.2f} x {fraction:g} - {static_gib:.2f} held before = {available_gib:.2f} GiB{capped}",
            ),
            Sum("max_total_num_tokens", f"{tokens:,}", f"pool / {cache.bytes_per_token:,} bytes{paged}"),
            *([Sum("graphs and buffers", f"{graphs_gib:.2f} GiB", buffers.explanation)] if buffers else []),
            Sum("left for activations", f"{headroom_gib:.2f} GiB", headroom_sum),
        ),
    )


def _tokens(inputs: PlanInputs, available_gib: float, token_bytes: int) -> int:
    tokens = max(0, int(available_gib * GIB / token_bytes))
    if inputs.max_total_tokens is not None:
        tokens = min(tokens, inputs.max_total_tokens)
    page = inputs.page_size or 1
    return tokens // page * page


def _buffers(inputs: PlanInputs, phase: Phase, cache: _Cache, memory_gib: float) -> Buffers:
    return count_buffers(
        gpu_memory_gib=memory_gib,
        tensor_ranks=inputs.tensor_parallel_size,
        stages=inputs.pipeline_parallel_size,
        attention_groups=inputs.attention_data_parallel_size,
        latent=cache.attention.kind == "MLA",
        prefill_graphs=phase != "capture",
        drafter=cache.drafter is not None,
        chunked_prefill_size=inputs.chunked_prefill_size,
        largest_batch=inputs.cuda_graph_max_batch_size,
        max_running_requests=inputs.max_running_requests,
    )


def _refusals(inputs: PlanInputs, cache: _Cache, static: _Static, gpu: _Gpu) -> Iterator[str]:
    yield from _kv_type_refusals(inputs)
    if inputs.gpus is not None and inputs.device == "cuda" and inputs.ranks > inputs.gpus:
        yield (
            f"{inputs.ranks} GPUs are needed, {inputs.gpus} are there: tensor {inputs.tensor_parallel_size} x pipeline "
            f"{inputs.pipeline_parallel_size} x data {inputs.data_parallel_size}"
        )
    if cache.drafter is not None and inputs.pipeline_parallel_size > 1:
        yield f"pipeline_parallel_size {inputs.pipeline_parallel_size}: SGLang has EAGLE-3 on one pipeline stage only"
    held_gib = static.line.static_bytes / GIB + cache.drafter_gib
    if gpu.tokens <= 0:
        least = (held_gib + (inputs.page_size or 1) * cache.bytes_per_token / GIB) / static.memory_gib
        remedy = f"a fraction above {least:.3f}" if least < 1 else "more or larger GPUs"
        remedy += f", or a smaller page_size than {inputs.page_size:,}" if inputs.page_size else ""
        yield (
            f"no KV pool: {static.memory_gib:.2f} GiB x {inputs.mem_fraction_static:g} = "
            f"{static.memory_gib * inputs.mem_fraction_static:.2f} GiB, and {held_gib:.2f} GiB are held before it; "
            f"expected {remedy}"
        )
    elif inputs.request_tokens is not None and inputs.request_tokens > gpu.tokens:
        yield (
            f"a request does not fit: {inputs.prompt_tokens:g} prompt + {inputs.response_tokens:g} response tokens = "
            f"{inputs.request_tokens:g}, the pool holds {gpu.tokens:,}"
        )
    if gpu.safe_gib is not None and gpu.headroom_gib <= 0:
        of_drafter = cache.drafter_excess_bytes / cache.bytes_per_token  # grows with the pool, and so with the fraction
        most = static.memory_gib - gpu.graphs_gib + of_drafter * held_gib
        most, least = most / (static.memory_gib * (1 + of_drafter)), held_gib / static.memory_gib
        remedy = (
            f"a fraction below {most:.3f}"
            if least < most
            else "smaller graphs (--cuda-graph-max-bs), or more or larger GPUs: no fraction leaves room for them"
        )
        yield f"graphs and buffers do not fit: {gpu.headroom_sum}; expected {remedy}"


def _kv_type_refusals(inputs: PlanInputs) -> Iterator[str]:
    kind = inputs.kv_cache_dtype
    if kind not in FULL_PRECISION_KV and not inputs.allow_quantised_kv:
        yield (
            f"kv_cache_dtype {kind} changes what the verifier writes: expected one of {', '.join(FULL_PRECISION_KV)}, "
            "or a reason that is recorded (--allow-quantised-kv)"
        )
    elif kind not in SERVED_KV_TYPES:
        yield f"kv_cache_dtype {kind}: SGLang 0.5.23 takes {', '.join(sorted(SERVED_KV_TYPES))}"


def _concurrent(inputs: PlanInputs, tokens: int) -> int | None:
    """Whole requests that run at once, in all pools."""
    if inputs.request_tokens is None:
        return None
    return min(int(tokens / inputs.request_tokens) * inputs.pools, _most_running(inputs, tokens))


def _most_running(inputs: PlanInputs, tokens: int) -> int:
    """Requests that SGLang lets run: as asked, else its own number (``resolve_max_num_reqs``)."""
    if inputs.max_running_requests is not None:
        return inputs.max_running_requests
    low, high = OWN_RUNNING_REQUESTS
    own = high if inputs.context_length is None else int(tokens / inputs.context_length * 512)
    return min(max(own, low), high) * inputs.pools


def _usage(inputs: PlanInputs, concurrent: int | None, tokens: int) -> float | None:
    """Share of the pools that the requests in flight take; with as many as fit where the client's number is unknown."""
    if concurrent is None or inputs.request_tokens is None or not tokens:
        return None
    running = concurrent if inputs.concurrency is None else min(concurrent, inputs.concurrency)
    return min(1.0, running * inputs.request_tokens / (tokens * inputs.pools))


def _request_sums(inputs: PlanInputs, concurrent: int | None, tokens: int) -> Iterator[Sum]:
    if concurrent is None:
        yield Sum(
            "concurrent requests",
            "not known",
            "give --prompt-tokens and --response-tokens, or mean lengths in the data sets' expected",
        )
        return
    pools = f" x {inputs.pools} pools" if inputs.pools > 1 else ""
    most = _most_running(inputs, tokens)
    whose = "SGLang's own limit" if inputs.max_running_requests is None else "max_running_requests"
    capped = f", at most {whose}, {most:,}" if concurrent == most else ""
    yield Sum(
        "concurrent requests",
        f"{concurrent:,}",
        f"{tokens:,} / ({inputs.prompt_tokens:g} prompt + {inputs.response_tokens:g} response tokens){pools}{capped}",
    )
    usage = _usage(inputs, concurrent, tokens)
    if usage is not None:
        running = concurrent if inputs.concurrency is None else min(concurrent, inputs.concurrency)
        queued = f"; {inputs.concurrency - running} of {inputs.concurrency} wait" if inputs.concurrency else ""
        yield Sum("expected token usage", f"{usage:.2f}", f"{running:,} running{queued}")


@dataclass(frozen=True)
class _Host:
    """The host's memory: what the hierarchical caches and captured states ask of it, and what would be safe."""

    hicache_gb: int
    safe_gb: int | None
    loading_gb: float | None
    states_gb: float = 0.0
    refusals: tuple[str, ...] = ()
    sums: tuple[Sum, ...] = ()
    estimated: tuple[str, ...] = ()


def _host(inputs: PlanInputs, phase: Phase) -> _Host:
    if inputs.device == "cpu":  # its memory is the host's, and the hierarchical cache needs CUDA
        return _Host(0, None, None)
    asked = 0 if phase == "capture" else inputs.hicache_size_gb_per_rank or 0
    if inputs.host_ram_gb is None:
        if asked:
            raise BadInput(
                f"a hierarchical cache of {asked} GB per rank is asked for, and the host's memory is not known: "
                "give --host-ram-gb"
            )
        return _Host(0, None, None)
    loading = inputs.host_loading_gb
    estimated = loading is None
    loading_gb = LOADING_GB_PER_RANK * inputs.ranks if loading is None else loading
    memory = HostMemory(
        available_gb=inputs.host_ram_gb,
        loading_gb=loading_gb,
        ranks=inputs.ranks,
        states_gb=inputs.host_states_gb if phase == "generate" else 0.0,
    )
    problem = memory.problem(asked)
    states = Sum(
        "states of unfinished samples",
        f"{memory.states_gb:.4g} GB",
        "hidden_states.capture_memory_gib, in the first rank's process",
    )
    how = f"{LOADING_GB_PER_RANK:g} GB a rank, as on the reference deployment" if estimated else "given"
    return _Host(
        hicache_gb=asked,
        safe_gb=memory.safe_hicache_gb_per_rank,
        loading_gb=loading_gb,
        states_gb=memory.states_gb,
        refusals=(problem,) if problem else (),
        sums=(
            Sum("host memory", f"{memory.available_gb:g} GB", f"of which loading takes {loading_gb:g} GB ({how})"),
            *([states] if memory.states_gb else []),
            Sum("hierarchical cache", f"{asked * inputs.ranks:,} GB", f"{inputs.ranks} x {asked} GB per rank"),
            Sum("safe per rank", f"{memory.safe_hicache_gb_per_rank} GB", memory.safe_hicache_sum),
        ),
        estimated=("the host memory that loading takes",) if estimated else (),
    )


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of some verdicts."""
    return max(verdicts, key=VERDICTS.index)


@dataclass(frozen=True)
class Suggestion:
    """The largest fraction that fits in every phase, the largest safe hierarchical cache, and how to drive it.

    ``concurrency`` is how many requests a client should keep in flight, None where the lengths are not known.
    """

    mem_fraction_static: float
    hicache_size_gb_per_rank: int | None
    concurrency: int | None
    max_total_num_tokens: int
    reason: str


def suggest(inputs: PlanInputs, phases: Iterable[Phase]) -> Suggestion | None:
    """What to serve with, or None where no fraction fits. The KV type stays at full precision, whatever was asked.

    Raises:
        BadInput: the server is for a CPU, whose memory others use too.
    """
    if inputs.device != "cuda":
        raise BadInput("device is cpu: a fraction is suggested for GPUs, which a server has to itself")
    wanted = list(phases)
    kind = inputs.kv_cache_dtype if inputs.kv_cache_dtype in FULL_PRECISION_KV else "auto"
    plain = replace(inputs, kv_cache_dtype=kind, hicache_size_gb_per_rank=None)
    for hundredths in range(99, 0, -1):
        asked = replace(plain, mem_fraction_static=hundredths / 100)
        plans = [plan_memory(asked, phase) for phase in wanted]
        if worst(plan.verdict for plan in plans) == "fits":
            tightest = min(plans, key=lambda plan: plan.headroom_gib)
            running = plans[0].concurrent_requests
            return Suggestion(
                mem_fraction_static=asked.mem_fraction_static,
                hicache_size_gb_per_rank=plans[0].hicache_safe_gb_per_rank,
                concurrency=None if running is None else QUEUE_FACTOR * running,
                max_total_num_tokens=plans[0].max_total_num_tokens,
                reason=f"{tightest.phase}: {tightest.reasons[0]}",
            )
    return None
