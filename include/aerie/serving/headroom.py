"""What a GPU needs besides weights and KV pool: CUDA graphs, buffers, and activations.

SGLang 0.5.23 estimates it in ``arg_groups/memory_hook.py``; the amounts here are its own, in MiB, until ``MEASURED``.
"""

from dataclasses import dataclass

GIB = 1 << 30
MIB_PER_GIB = 1024

METADATA_MIB = 512.0
"""Of the attention backend, whatever is served."""
PER_EIGHT_RANKS_MIB = 1024.0
PER_DECODE_REQUEST_MIB = 2.0
"""Of the decode graphs, for each request of the largest batch."""
PER_REQUEST_AND_GROUP_MIB = 3.0
"""With data-parallel attention, in addition: for each request of the largest batch and attention group."""
LARGE_BATCH, LARGE_BATCH_FACTOR = 300, 1.5
"""Above such a batch, half as much again."""
LATENT_PREFILL_GRAPHS_MIB = 1536.0
PER_PREFILL_GRAPH_MIB = 8.0

MEASURED = 1.445
"""The reference deployment (8 ranks, MLA, 94.04 GiB, chunks of 8,192, batches of 512) lost 5.78 GiB to graphs and
buffers: at 0.93 6.58 GiB were left by the fraction and 0.8 after them, at 0.88 11.28 and 5.5. SGLang's sum is 4.0."""

SAFE_LEFT_GIB = 3.0
"""Least memory left after graphs and buffers, for activations: 0.8 GiB ended in out of memory, 5.5 did not."""
CHUNK_OF_REFERENCE = 8192

# GPU memory up to, in GiB; chunked prefill size; largest decode batch with fewer than 4 ranks, and with 4 or more.
_DEFAULTS = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)


@dataclass(frozen=True)
class Buffers:
    """GiB that graphs and buffers take on each GPU, and the sizes that they were counted for."""

    graphs_gib: float
    chunked_prefill_size: int
    largest_batch: int
    explanation: str

    @property
    def safe_left_gib(self) -> float:
        """Least memory to leave for activations, which grow with the chunk; never less than the rule of thumb."""
        return SAFE_LEFT_GIB * max(1.0, self.chunked_prefill_size / CHUNK_OF_REFERENCE)


def count_buffers(
    *,
    gpu_memory_gib: float,
    tensor_ranks: int,
    stages: int,
    attention_groups: int,
    latent: bool,
    prefill_graphs: bool,
    drafter: bool,
    chunked_prefill_size: int | None,
    largest_batch: int | None,
    max_running_requests: int | None,
) -> Buffers:
    """Count what graphs and buffers take; sizes that are not given are SGLang's own for such a GPU.

    ``latent`` is MLA. A drafter has decode graphs of its own beside the verifier's, which SGLang's sum leaves out.
    """
    chunk, batch = _defaults(gpu_memory_gib, tensor_ranks, chunked_prefill_size, largest_batch, max_running_requests)
    decode = PER_DECODE_REQUEST_MIB * batch * (2 if drafter else 1)
    if attention_groups > 1:
        factor = LARGE_BATCH_FACTOR if batch > LARGE_BATCH else 1.0
        decode += PER_REQUEST_AND_GROUP_MIB * batch * attention_groups * factor
    prefill = 0.0
    if prefill_graphs and stages == 1:  # with a pipeline SGLang has none unless told to
        prefill = LATENT_PREFILL_GRAPHS_MIB if latent else PER_PREFILL_GRAPH_MIB * _prefill_graphs(chunk)
    parallel = PER_EIGHT_RANKS_MIB * tensor_ranks * stages / 8
    total = METADATA_MIB + parallel + decode + prefill
    gib = total * MEASURED / MIB_PER_GIB
    return Buffers(
        graphs_gib=gib,
        chunked_prefill_size=chunk,
        largest_batch=batch,
        explanation=(
            f"({METADATA_MIB:g} metadata + {parallel:g} ranks + {decode:g} decode graphs to batch {batch} + "
            f"{prefill:g} prefill graphs) MiB x {MEASURED:g} as measured on the reference = {gib:.2f} GiB"
        ),
    )


def _defaults(
    gpu_memory_gib: float, ranks: int, chunk: int | None, batch: int | None, running: int | None
) -> tuple[int, int]:
    chunk_default, few, many = next(rest for limit, *rest in _DEFAULTS if gpu_memory_gib < limit)
    batch_default = few if ranks < 4 else many
    return chunk or chunk_default, batch or min(batch_default, running or batch_default)


def _prefill_graphs(chunk: int) -> int:
    """Prefill graphs up to a chunk, as ``generate_prefill_cuda_graph_batch_sizes`` lists them."""
    spans = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, chunk + 1, 512))
    return sum(len(range(start, min(stop, chunk + 1), step)) for start, stop, step in spans)
