"""What a memory plan is made from. ``None`` is: not known, or left to SGLang."""

from dataclasses import dataclass
from typing import Literal

from aerie.serving.model_config import ModelConfig


@dataclass(frozen=True)
class DrafterInputs:
    """What is known of the drafter: a configuration of its own, or None where there is none yet."""

    vocabulary: int | None = None
    intermediate_size: int | None = None
    config: ModelConfig | None = None


@dataclass(frozen=True)
class ObservedPool:
    """``max_total_num_tokens`` of a server of this model on such GPUs, without a drafter."""

    fraction: float
    kv_cache_dtype: str
    tokens: int


@dataclass(frozen=True)
class PlanInputs:
    """A server and the machine it is for. GiB is 2^30 bytes, as GPUs are sold and SGLang counts; GB is 10^9 bytes.

    ``gpu_memory_gib`` is what one GPU (on a CPU: the host) has free before the server loads. ``weights_bytes`` are
    those of the whole checkpoint. ``host_ram_gb`` is the host's memory for the server, ``host_loading_gb`` what of it
    loading takes, ``host_states_gb`` what of it a server that generates may hold of unfinished samples' hidden states.
    ``concurrency`` is how many requests the client keeps in flight.
    """

    config: ModelConfig
    mem_fraction_static: float
    dtype: str = "bfloat16"
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int | None = None
    gpu_memory_gib: float | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    allow_quantised_kv: str | None = None
    page_size: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    cuda_graph_max_batch_size: int | None = None
    weights_bytes: float | None = None
    host_ram_gb: float | None = None
    host_loading_gb: float | None = None
    host_states_gb: float = 0.0
    hicache_size_gb_per_rank: int | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    concurrency: int | None = None
    observed: tuple[ObservedPool, ...] = ()
    drafter: DrafterInputs = DrafterInputs()

    @property
    def attention_ranks(self) -> int:
        """Ranks that share the heads of one attention group."""
        return self.tensor_parallel_size // self.attention_data_parallel_size

    @property
    def ranks(self) -> int:
        """GPUs of all replicas: as many processes share the host's memory."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def pools(self) -> int:
        """KV pools among which requests are divided: one for each attention group of each replica."""
        return self.attention_data_parallel_size * self.data_parallel_size

    @property
    def request_tokens(self) -> float | None:
        """Tokens of a whole request, where both lengths are known."""
        if self.prompt_tokens is None or self.response_tokens is None:
            return None
        return self.prompt_tokens + self.response_tokens
