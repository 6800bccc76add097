"""Known failures of a server: what the log says, what it means, and the remedy that fits.

The texts are those of SGLang 0.5.23, PyTorch and transformers, read from their source or seen in a log. The table is in
order: of two failures that fit, the first is the cause and the later one what followed from it, or the more general.
"""

from dataclasses import dataclass
from typing import Literal

from aerie.errors import AerieError
from aerie.serving.errors import (
    LaunchFailed,
    MachineNotReady,
    OutOfMemoryAtStart,
    OutOfMemoryInDecode,
    OutOfMemoryInPrefill,
)

Doing = Literal["Prefill", "Decode"]

GPU_OUT_OF_MEMORY = (
    r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|Triton Error \[CUDA\]: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|in AlignedAllocator"
)

RAISED = r"Traceback"
"""Any traceback: SGLang says the same in a warning, where it can do without."""

# What a traceback passes through says what the memory was for.
CAPTURE_FRAMES = (
    r"in (?:init_(?:decode_|prefill_)?cuda_graphs?|init_attention_backends|_dummy_run|\w*autotune\w*|\w*warm_?up\w*)$"
)
LOADING_FRAMES = r"in (?:load_model|load_weights\w*|initialize_model|_initialize_model)$"
POOL_FRAMES = r"in (?:alloc_memory_pool|init_memory_pools?|_init_pools)$"
DECODE_FRAMES = (
    r"in (?:_execute_decode|forward_decode|prepare_for_decode|draft|draft_forward|verify|\w*_for_decode)$"
    r'|decode_cuda_graph_runner\.py", line \d+, in (?:execute|load_batch|replay\w*)$'
)
PREFILL_FRAMES = r"in (?:_execute_extend\w*|forward_extend|forward_split_prefill|prepare_for_extend|\w*_for_prefill)$"


@dataclass(frozen=True)
class KnownFailure:
    """A way to fail, how it is recognised, and what to do.

    ``says`` is what the log says, for people. ``pattern`` must be found in one message, whose traceback must pass
    through ``frames`` where they are given; ``doing`` is what the server must have done last.
    """

    says: str
    pattern: str
    advice: str
    frames: str | None = None
    doing: Doing | None = None
    error: type[AerieError] = LaunchFailed


LESS_POOL = "lower serving.mem_fraction_static (./aerie plan --suggest finds the largest safe one)"
LESS_PREFILL = "lower serving.chunked_prefill_size (4096, then 2048)"
LESS_DECODE = "lower serving.max_running_requests"
OTHER_BACKEND = (
    'add "--attention-backend", "triton" to serving.extra_arguments, or "flashinfer" '
    '("trtllm_mla" has no prefill on SM120)'
)
SETUP = "run ./aerie setup, or use the image that docker-compose.yaml names"
LEFTOVERS = "see who holds the GPUs with nvidia-smi, and end what an earlier server left with ./aerie server reap"

KNOWN: tuple[KnownFailure, ...] = (
    KnownFailure(
        says="Not enough host memory available. Requesting 300.00 GB but only have 48.10 GB free",
        pattern=r"Not enough host memory|reduce the size of the hierarchical cache",
        advice=(
            "the ranks' hierarchical caches exceed the host's memory: lower serving.hicache_size_gb_per_rank, which is "
            "taken by every rank (./aerie plan shows the sum)"
        ),
    ),
    KnownFailure(
        says="Loaded weights leave no GPU memory for the KV cache; Please try to increase --mem-fraction-static",
        pattern=(
            r"Loaded weights leave no GPU memory for the KV cache|try to increase --mem-fraction-static"
            r"|Memory pool size is too small|max_running_request is zero"
        ),
        advice=(
            "the weights leave no room for the KV cache within the fraction: raise serving.mem_fraction_static "
            "(./aerie plan --suggest), or divide the weights among more GPUs with serving.tensor_parallel_size"
        ),
    ),
    KnownFailure(
        says="Not enough GPU memory for hybrid (mamba/linear-attention) state cache",
        pattern=r"Not enough GPU memory for hybrid|Not enough space for mamba",
        advice=f"the states of linear attention do not fit beside the weights: {LESS_DECODE}",
        error=OutOfMemoryInDecode,
    ),
    KnownFailure(
        says="Capture cuda graph failed: CUDA out of memory",
        pattern=GPU_OUT_OF_MEMORY,
        frames=CAPTURE_FRAMES,
        advice=(
            f"no memory is left for CUDA graphs and warm-up beside weights and KV cache: {LESS_POOL}, or "
            "serving.cuda_graph_max_batch_size"
        ),
        error=OutOfMemoryAtStart,
    ),
    KnownFailure(
        says="CUDA out of memory, while the KV pool is allocated",
        pattern=GPU_OUT_OF_MEMORY,
        frames=POOL_FRAMES,
        advice=f"the KV pool does not fit beside what holds the GPU already: {LESS_POOL}; {LEFTOVERS}",
        error=OutOfMemoryAtStart,
    ),
    KnownFailure(
        says="CUDA out of memory, while the weights are loaded",
        pattern=GPU_OUT_OF_MEMORY,
        frames=LOADING_FRAMES,
        advice=(
            "the weights alone do not fit, whatever the fraction: divide them among more GPUs with "
            f"serving.tensor_parallel_size; {LEFTOVERS}"
        ),
    ),
    KnownFailure(
        says="CUDA out of memory, in a decoding step",
        pattern=GPU_OUT_OF_MEMORY,
        frames=DECODE_FRAMES,
        advice=f"a step of the running requests does not fit beside weights and KV cache: {LESS_DECODE}",
        error=OutOfMemoryInDecode,
    ),
    KnownFailure(
        says="CUDA out of memory, in a prefill",
        pattern=GPU_OUT_OF_MEMORY,
        frames=PREFILL_FRAMES,
        advice=(
            f"the activations of a prompt do not fit beside weights and KV cache: {LESS_PREFILL}, then "
            "serving.mem_fraction_static"
        ),
        error=OutOfMemoryInPrefill,
    ),
    KnownFailure(
        says="Decode out of memory. Try to lower your batch size; alloc_req_slots runs out of memory",
        pattern=r"Decode out of memory\. Try to lower|alloc_req_slots runs out of memory",
        advice=f"the KV pool has no slot for the next tokens of all that runs: {LESS_DECODE}",
        error=OutOfMemoryInDecode,
    ),
    KnownFailure(
        says="Prefill out of memory. Try to lower your batch size",
        pattern=r"(?:Prefill o|^\w*Error: O|\] O)ut of memory\. Try to lower",
        advice=(
            f"the KV pool has no room for the next part of a prompt: {LESS_PREFILL}, or serving.max_running_requests"
        ),
        error=OutOfMemoryInPrefill,
    ),
    KnownFailure(
        says="CUDA out of memory, without a traceback, while requests decode",
        pattern=GPU_OUT_OF_MEMORY,
        doing="Decode",
        advice=f"a step of the running requests did not fit, as the last batch was one: {LESS_DECODE}",
        error=OutOfMemoryInDecode,
    ),
    KnownFailure(
        says="CUDA out of memory, without a traceback, after a prefill batch",
        pattern=GPU_OUT_OF_MEMORY,
        doing="Prefill",
        advice=f"a prompt did not fit, as the last batch was a prefill: {LESS_PREFILL}",
        error=OutOfMemoryInPrefill,
    ),
    KnownFailure(
        says="CUDA out of memory, before any request",
        pattern=GPU_OUT_OF_MEMORY,
        advice=f"the GPU has no memory left beside weights and KV cache: {LESS_POOL}; {LEFTOVERS}",
        error=OutOfMemoryAtStart,
    ),
    KnownFailure(
        says="The memory capacity is unbalanced. Some GPUs may be occupied by other processes",
        pattern=r"memory capacity is unbalanced",
        advice=f"another process holds memory of some GPUs: {LEFTOVERS}",
    ),
    KnownFailure(
        says="DefaultCPUAllocator: can't allocate memory; Cannot allocate memory",
        pattern=r"DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc|\[Errno 12\]",
        advice=(
            "the host has no memory left: lower serving.hicache_size_gb_per_rank (on a CPU server "
            "serving.max_total_tokens or serving.mem_fraction_static), or end what else runs there"
        ),
    ),
    KnownFailure(
        says="No space left on device",
        pattern=r"No space left on device|\[Errno 28\]|\[Errno 122\]",
        advice="a disk is full (the server folder's, the temporary folder's or /dev/shm): make room and start again",
    ),
    KnownFailure(
        says="Address already in use; is not available in 30 seconds",
        pattern=r"address already in use|is not available in \d+ seconds|is used by a process already",
        advice="another process listens on the port: stop it, or set serving.port to another one or to none",
        error=MachineNotReady,
    ),
    KnownFailure(
        says="You are trying to access a gated repo; Cannot access gated repo for url",
        pattern=r"gated repo|GatedRepoError",
        frames=RAISED,
        advice=(
            "the model is gated: accept its terms, set HF_TOKEN, and get it with ./aerie fetch-model; the server "
            "itself "
            "downloads nothing and reads verifier.path"
        ),
    ),
    KnownFailure(
        says="contains custom code which must be executed; consider using the --trust-remote-code flag",
        pattern=(
            r"contains custom code which must be executed|references custom code contained in"
            r"|requires you to execute the \w+ file|using the `?--trust-remote-code|trust_remote_code=True"
        ),
        frames=RAISED,
        advice=(
            "the checkpoint brings code of its own: read it, then set verifier.trust_remote_code with "
            "verifier.revision "
            "pinned to the commit that was read"
        ),
    ),
    KnownFailure(
        says="Error while deserializing header: incomplete metadata, file not fully covered",
        pattern=r"SafetensorError|Error while deserializing header|not fully covered",
        frames=RAISED,
        advice=(
            "a file of the weights is cut or damaged: get it again with ./aerie fetch-model, which checks every shard"
        ),
    ),
    KnownFailure(
        says=(
            "Repo id must be in the form; is not a local folder; Cannot find any model weights; couldn't find them in "
            "the cached files"
        ),
        pattern=(
            r"Repo id must be in the form|is not a local folder|does not appear to have a file named"
            r"|Cannot find any model weights|couldn't find them in the\s+cached files|LocalEntryNotFoundError"
            r"|outgoing traffic has been disabled|OfflineModeIsEnabled|is not a valid git identifier"
            r"|Can't load (?:the )?(?:configuration|tokenizer|model)|Unrecognized model in"
        ),
        frames=RAISED,
        advice=(
            "verifier.path is not the folder of a whole checkpoint: correct it, or get the model with ./aerie "
            "fetch-model; "
            "the server downloads nothing"
        ),
    ),
    KnownFailure(
        says="TRTLLM MLA backend is only supported on; TllmGenFmhaRunner: Unsupported architecture",
        pattern=(
            r"TllmGenFmhaRunner|Unsupported architecture|(?:TRTLLM|CuteDSL|TensorRT-LLM) M[HL]A backend"
            r"|TRTLLM FMHAv2|FlashAttention v\d Backend requires|backend can only be used with (?:non-)?MLA models"
            r"|attention backend requires an? SM|Please use a different (?:\w+ )?backend|Invalid attention backend"
        ),
        frames=RAISED,
        advice=f"the attention backend does not run this model on these GPUs: {OTHER_BACKEND}",
    ),
    KnownFailure(
        says="SGLang only supports sm75 and above; The quantization method ... Minimum capability: 80",
        pattern=r"only supports sm\d+ and above|Minimum capability: \d+",
        frames=RAISED,
        advice="the GPUs are older than this SGLang, or the checkpoint's quantisation, needs: take newer ones",
    ),
    KnownFailure(
        says="no kernel image is available for execution on the device",
        pattern=r"no kernel image is available|cudaErrorNoKernelImageForDevice|not compatible with the current PyTorch",
        frames=RAISED,
        advice=(
            f"an installed kernel was not built for these GPUs: {SETUP}; if it is an attention kernel, {OTHER_BACKEND}"
        ),
    ),
    KnownFailure(
        says="The NVIDIA driver on your system is too old; CUDA driver version is insufficient",
        pattern=(
            r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
            r"|unsupported display driver|provided PTX was compiled with an unsupported toolchain"
            r"|Error 80[34]:"
        ),
        advice=(
            "the host's NVIDIA driver is older than this CUDA needs: update the driver (nvidia-smi shows both versions)"
        ),
    ),
    KnownFailure(
        says="Found no NVIDIA driver; No accelerator (CUDA, ...) is available; invalid device ordinal",
        pattern=(
            r"Found no NVIDIA driver|No accelerator \(|No supported accelerator|No CUDA GPUs are available"
            r"|invalid device ordinal|no CUDA-capable device|not compiled with CUDA enabled"
        ),
        frames=RAISED,
        advice=(
            "the server sees fewer GPUs than the plan has: look at nvidia-smi and CUDA_VISIBLE_DEVICES, and correct "
            "serving.tensor_parallel_size (or serving.device)"
        ),
    ),
    KnownFailure(
        says="sglang-kernel with minimum required version is not installed; cannot open shared object file",
        pattern=(
            r"with minimum required version \S+ is not installed|less than the minimum required version"
            r"|cannot open shared object file|undefined symbol|Could not load any common_ops library"
            r"|Failed to load NCCL library"
        ),
        frames=RAISED,
        advice=f"a kernel library is missing, or does not fit the others: {SETUP}",
    ),
    KnownFailure(
        says="ModuleNotFoundError; ImportError",
        pattern=r"^(?:ModuleNotFoundError|ImportError)\b",
        frames=RAISED,
        advice=f"the serve environment is not complete: {SETUP}",
    ),
    KnownFailure(
        says="Model architectures [...] are not supported for now; Transformers does not recognize this architecture",
        pattern=r"are not supported for now|does not recognize this architecture|failed to be inspected",
        frames=RAISED,
        advice="this SGLang does not know the model's architecture: see verifier.path, or take a release that knows it",
    ),
    KnownFailure(
        says="does not match the quantization method specified in; quantization is currently not supported",
        pattern=r"does not match the quantization|quantization is currently not|Unknown quantization method",
        frames=RAISED,
        advice=(
            "the checkpoint says how it is quantised, and this SGLang must know it: leave --quantization out of "
            "serving.extra_arguments, or take another checkpoint"
        ),
    ),
    KnownFailure(
        says="does not implement set_eagle3_layers_to_capture",
        pattern=r"set_eagle3_layers_to_capture",
        frames=RAISED,
        advice="this SGLang cannot serve an EAGLE-3 drafter with this model: take a release that can",
    ),
    KnownFailure(
        says="Attempted to load weight; size mismatch; The size of tensor a must match the size of tensor b",
        pattern=r"Attempted to load weight|size mismatch|shape mismatch|The size of tensor a",
        frames=LOADING_FRAMES,
        advice=(
            "a tensor has another shape than config.json says: the files are of different models or revisions; get the "
            "verifier again with ./aerie fetch-model, or export the drafter again"
        ),
    ),
    KnownFailure(
        says="context_length (...) is greater than the derived context_length (...)",
        pattern=r"is greater than the derived context_length",
        frames=RAISED,
        advice="the model was not made for so long a context: lower serving.context_length",
    ),
    KnownFailure(
        says="chunked_prefill_size must be divisible by page_size",
        pattern=r"chunked_prefill_size must be divisible by page_size",
        advice="make serving.chunked_prefill_size a multiple of serving.page_size",
    ),
    KnownFailure(
        says="is not divisible by; must be divisible by",
        pattern=r"^(?:AssertionError|ValueError|RuntimeError)\b.*divisible by",
        advice=(
            "the model's heads, experts or layers cannot be divided among so many ranks: change "
            "serving.tensor_parallel_size (or the other parallel sizes)"
        ),
    ),
    KnownFailure(
        says="error: unrecognized arguments; error: argument ...: invalid choice",
        pattern=r"error: (?:unrecognized arguments|argument |ambiguous option|the following arguments)",
        advice="this SGLang does not take an argument: correct serving.extra_arguments",
    ),
    KnownFailure(
        says="Too many open files",
        pattern=r"Too many open files|\[Errno 24\]",
        advice=(
            "the limit of open files is too low for so many connections: raise it (ulimit -n 65536) for the keeper's "
            "user"
        ),
    ),
    KnownFailure(
        says="Ninja build failed; CUDA_HOME environment variable is not set; Error building extension",
        pattern=r"Ninja build failed|Error building extension|CUDA_HOME environment variable is not|nvcc: not found",
        frames=RAISED,
        advice=(
            "a kernel is compiled at the start, and the host has no whole CUDA toolkit (nvcc, headers) of PyTorch's "
            "version: install it and set CUDA_HOME, or use the image that docker-compose.yaml names"
        ),
    ),
    KnownFailure(
        says="out of resource: shared memory, Required: 106496, Hardware limit: 101376",
        pattern=r"out of resource: shared memory|Shared memory .* exceeds|Failed to set .*dynamic shared memory",
        frames=RAISED,
        advice=(
            "a kernel was tuned for GPUs with more shared memory (SM120 has 99 KiB a block, SM90 and SM100 227): "
            f"{OTHER_BACKEND}; where it is a kernel of the experts, another --moe-runner-backend"
        ),
    ),
    KnownFailure(
        says="peer access is not supported between these two devices",
        pattern=r"peer access is not supported",
        frames=RAISED,
        advice='these GPUs cannot read each other: add "--disable-custom-all-reduce" to serving.extra_arguments',
    ),
    KnownFailure(
        says="Error 802: system not yet initialized",
        pattern=r"Error 802:|system not yet initialized",
        advice=(
            "the GPUs' fabric is not up: start NVIDIA's fabric manager of the driver's version on the host "
            "(systemctl status nvidia-fabricmanager)"
        ),
    ),
    KnownFailure(
        says="Fatal Python error: Bus error",
        pattern=r"Bus error|exit code:? -7\b|terminated with -7\b",
        advice=(
            "the shared memory of the host or the container is full (give it 16 GB or more, --shm-size), or a file was "
            "cut while it was read"
        ),
    ),
    KnownFailure(
        says="an illegal memory access was encountered; device-side assert triggered",
        pattern=r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|uncorrectable",
        advice=(
            f"a kernel failed on the GPU: {OTHER_BACKEND}; if dmesg shows an Xid error, the GPU itself, then take it "
            "out"
        ),
    ),
    KnownFailure(
        says="Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        pattern=r"watchdog timeout \(",
        advice=(
            "one forward pass took longer than the watchdog allows, or a rank hangs: "
            f'{LESS_PREFILL}, or allow more with "--watchdog-timeout", "900" in serving.extra_arguments'
        ),
    ),
    KnownFailure(
        says="NCCL error: unhandled system error; Watchdog caught collective operation timeout; didn't finish loading",
        pattern=(
            r"NCCL error|nccl\w*Error|ncclRemoteError|DistBackendError|Watchdog caught collective operation timeout"
            r"|Process group watchdog thread terminated|Connection closed by peer|gloo/transport\S+ Timed out"
            r"|^\S*Error\b.*TCPStore|didn't finish loading"
        ),
        advice=(
            "the ranks lost each other: look in the log for the rank that failed first, give a container a /dev/shm of "
            "16 GB or more (--shm-size), and set NCCL_DEBUG=INFO (without NVLink also NCCL_P2P_DISABLE=1) to see more"
        ),
    ),
    KnownFailure(
        says="scheduler died during initialization (exit code: -9); nothing, and the process was ended by SIGKILL",
        pattern=r"exit code:? -9\b|terminated with -9\b",
        advice=(
            "somebody killed it, most likely the kernel because the host ran out of memory (dmesg -T | grep -i oom "
            "shows "
            "it): lower serving.hicache_size_gb_per_rank, or give the host more memory for loading"
        ),
    ),
    KnownFailure(
        says="crashed with exit code -11; Fatal Python error: Segmentation fault",
        pattern=(
            r"exit code:? -(?:4|6|8|11)\b|terminated with -(?:4|6|8|11)\b|Fatal Python error"
            r"|Segmentation fault"
        ),
        advice=f"native code crashed, mostly a kernel that does not fit the GPU or the driver: {SETUP}",
    ),
)
"""All that is recognised, in order."""

KILLED = next(failure for failure in KNOWN if "SIGKILL" in failure.says)
"""What an end by SIGKILL means where the log says nothing."""
