"""Logs of servers that fail, as SGLang 0.5.23 writes them: its texts and its frames, with a real deployment's sizes."""

# ruff: noqa: E501 - logs are as wide as they are

from dataclasses import dataclass

from aerie.errors import AerieError
from aerie.serving.errors import (
    LaunchFailed,
    MachineNotReady,
    OutOfMemoryAtStart,
    OutOfMemoryInDecode,
    OutOfMemoryInPrefill,
)

SRT = "/opt/serve/lib/python3.11/site-packages/sglang/srt"

COMMAND = (
    "$ /opt/serve/bin/python -m sglang.launch_server --model-path /models/kimi --mem-fraction-static 0.93 "
    "--trust-remote-code --watchdog-timeout 300 --served-model-name launch-1"
)
LOADING = f"""{COMMAND}
/opt/serve/lib/python3.11/site-packages/sglang/srt/layers/quantization/gguf.py:76: UserWarning: out of memory is not all
  warnings.warn(f"Address already in use")
[2026-11-30 00:00:12] server_args={{'model_path': '/models/kimi', 'trust_remote_code': True, 'watchdog_timeout': 300, \
'attention_backend': 'trtllm_mla', 'message': 'CUDA out of memory'}}
[2026-11-30 00:00:14 TP0] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'
[2026-11-30 00:00:15 TP0] Load weight begin. avail mem=94.03 GB
Loading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]\r\
Loading safetensors checkpoint shards:  25% Completed | 16/64 [01:20<04:00,  5.00s/it]\r\
Loading safetensors checkpoint shards:  26% Completed | 17/64 [01:25<03:55,  5.00s/it]\r\
Loading safetensors checkpoint shards: 100% Completed | 64/64 [05:20<00:00,  5.00s/it]
"""
LOADED = f"""{LOADING}
[2026-11-30 00:05:36 TP0] Load weight end. elapsed=321.10 s, type=KimiK25ForConditionalGeneration, avail mem=20.11 GB, mem usage=73.92 GB.
[2026-11-30 00:05:36 TP1] Load weight end. elapsed=321.10 s, type=KimiK25ForConditionalGeneration, avail mem=20.10 GB, mem usage=73.93 GB.
"""
SIZED = f"""{LOADED}
[2026-11-30 00:05:38 TP1] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 231120, KV size: 15.13 GB
[2026-11-30 00:05:38 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 231120, KV size: 15.13 GB
[2026-11-30 00:05:38 TP0] Memory pool end. avail mem=6.60 GB
"""
CAPTURED = f"""{SIZED}
[2026-11-30 00:05:39 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=6.60 GB
  0%|          | 0/23 [00:00<?, ?it/s]\r\
Capturing batches (bs=160 avail_mem=6.51 GB):   0%|          | 0/23 [00:00<?, ?it/s]\r\
Capturing batches (bs=96 avail_mem=3.51 GB):  52%|#####2    | 12/23 [00:07<00:07,  1.50it/s]\r\
Capturing batches (bs=1 avail_mem=0.82 GB): 100%|##########| 23/23 [00:15<00:00,  1.50it/s]
[2026-11-30 00:05:55 TP0] Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=15.90 s, mem usage=5.78 GB, avail mem=0.82 GB.
[2026-11-30 00:05:56 TP0] max_total_num_tokens=231120, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=65536, available_gpu_mem=0.82 GB
"""
READY = f"""{CAPTURED}
[2026-11-30 00:06:05] The server is fired up and ready to roll!
"""
PREFILLS = "[2026-11-30 00:20:01 TP0] Prefill batch, #new-seq: 4, #new-token: 8192, #cached-token: 0, token usage: 0.41, #running-req: 72, #queue-req: 79, #pending-token: 0, cuda graph: False, input throughput (token/s): 911.07\n"
DECODES = "[2026-11-30 00:20:01 TP0] Decode batch, #running-req: 72, #token: 152904, token usage: 0.96, cuda graph: True, gen throughput (token/s): 931.10, #queue-req: 79\n"

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 94.97 GiB of "
    "which 820.00 MiB is free. Including non-PyTorch memory, this process has 94.16 GiB memory in use. Of the allocated "
    "memory 91.20 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)
SIGQUIT = "[2026-11-30 00:20:02] Received sigquit from a child process. It usually means the child failed.\n"
NCCL = (
    "[rank3]:[E1130 00:20:32.1 ProcessGroupNCCL.cpp:684] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=7168) ran for 600000 milliseconds before timing out.\n"
)
CAPTURE_FAILED = """Capture cuda graph failed: CUDA out of memory. Tried to allocate 640.00 MiB. GPU 0 has a total capacity \
of 94.97 GiB of which 412.00 MiB is free.
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)
3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. (Not recommended. Huge performance loss)
Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose"""

STARTING = (
    ("managers/scheduler.py", 6362, "run_scheduler_process", "scheduler = Scheduler(server_args, port_args)"),
    ("managers/scheduler.py", 568, "__init__", "self.init_model_worker()"),
)
LOADS = (
    *STARTING,
    ("managers/scheduler.py", 1033, "init_tp_model_worker", "self.tp_worker = TpModelWorker(**worker_kwargs)"),
    ("model_executor/model_runner.py", 715, "initialize", "self.load_model()"),
    ("model_executor/model_runner.py", 1312, "load_model", "loaded = load_model_with_memory_saver("),
    ("model_loader/loader.py", 1020, "load_model", "self.load_weights_and_postprocess("),
)
POOLS = (
    *STARTING,
    ("managers/scheduler.py", 1137, "init_model_worker", "self.init_memory_pools()"),
    ("model_executor/model_runner.py", 982, "alloc_memory_pool", "result = self.kv_cache_configurator.configure("),
    ("mem_cache/kv_cache_configurator.py", 480, "configure", "pools = self._init_pools("),
    ("mem_cache/memory_pool.py", 2451, "_create_buffers", "self._create_buffers_normal()"),
)
CAPTURES = (
    *STARTING,
    ("managers/scheduler.py", 1124, "init_cuda_graphs", "self.tp_worker.init_cuda_graphs()"),
    ("model_executor/runner/decode_cuda_graph_runner.py", 600, "__init__", "self.capture()"),
    ("model_executor/runner/decode_cuda_graph_runner.py", 1359, "_capture_one_stream", "self.capture_one_shape("),
    ("models/deepseek_v2.py", 2210, "forward_decode", "return self.model(input_ids)"),
)
RUNS = (
    ("managers/scheduler.py", 6368, "run_scheduler_process", "scheduler.run_event_loop()"),
    ("managers/scheduler.py", 2109, "event_loop_overlap", "batch_result = self.run_batch(batch)"),
    ("managers/scheduler.py", 4829, "run_batch", "batch_result = self.model_worker.forward_batch_generation("),
)
FORWARDS = (
    *RUNS,
    ("managers/tp_worker.py", 675, "forward_batch_generation", "out = self.model_runner.forward("),
    ("model_executor/model_runner.py", 1860, "forward", "output = self._forward_raw("),
)
PREFILL = (
    *FORWARDS,
    ("model_executor/runner/eager_runner.py", 226, "execute", "return self._execute_extend(forward_batch)"),
    ("model_executor/runner/eager_runner.py", 331, "_execute_extend", "ret = self.model.forward("),
)
DECODE = (
    *FORWARDS,
    ("model_executor/runner/eager_runner.py", 222, "execute", "return self._execute_decode(forward_batch)"),
    ("model_executor/runner/eager_runner.py", 262, "_execute_decode", "ret = self.model.forward("),
)
VERIFY = (
    *RUNS,
    ("speculative/eagle_worker_v2.py", 1483, "forward_batch_generation", "batch_output = self.verify("),
    ("speculative/eagle_worker_v2.py", 2055, "verify", "forward_output = self.target_worker.forward_batch_generation("),
    ("model_executor/runner/eager_runner.py", 331, "_execute_extend", "ret = self.model.forward("),
)


def traceback(frames: tuple[tuple[str, int, str, str], ...], exception: str) -> str:
    lines = [f'  File "{SRT}/{file}", line {line}, in {name}\n    {code}\n' for file, line, name, code in frames]
    return f"Traceback (most recent call last):\n{''.join(lines)}{exception}\n\n"


def hit(frames: tuple[tuple[str, int, str, str], ...], exception: str, rank: str = " TP0") -> str:
    """A scheduler's last words, and its parent's."""
    return f"[2026-11-30 00:20:02{rank}] Scheduler hit an exception: {traceback(frames, exception)}{SIGQUIT}"


@dataclass(frozen=True)
class Failing:
    """A log, what a person must be told to do about it, and as what it fails."""

    name: str
    log: str
    advice: str
    error: type[AerieError] = LaunchFailed
    status: int | None = None


FAILING = (
    Failing(
        "host memory",
        CAPTURED
        + hit(
            STARTING,
            "ValueError: Not enough host memory available. Requesting 300.00 GB but only have 48.10 GB free. Please "
            "reduce the size of the hierarchical cache.",
        ),
        "lower serving.hicache_size_gb_per_rank",
    ),
    Failing(
        "weights fill the fraction",
        LOADED
        + hit(
            POOLS,
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7. Raise "
            "--mem-fraction-static above 0.789 (minimum viable = 1 - available/pre = 0.7888). If using speculative "
            "decoding, draft weights are now counted.",
        ),
        "raise serving.mem_fraction_static",
    ),
    Failing(
        "no tokens in the pool",
        LOADED
        + hit(
            POOLS,
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            "mem_fraction_static=0.79",
        ),
        "raise serving.mem_fraction_static",
    ),
    Failing("weights too large", LOADING + hit(LOADS, OUT_OF_MEMORY), "the weights alone do not fit"),
    Failing(
        "pool too large", LOADED + hit(POOLS, OUT_OF_MEMORY), "lower serving.mem_fraction_static", OutOfMemoryAtStart
    ),
    Failing(
        "graphs too large",
        SIZED
        + f"[2026-11-30 00:20:02 TP0] Scheduler hit an exception: {traceback(CAPTURES, OUT_OF_MEMORY)}"
        + "During handling of the above exception, another exception occurred:\n\n"
        + traceback(CAPTURES[:4], f"Exception: {CAPTURE_FAILED}")
        + SIGQUIT,
        "serving.cuda_graph_max_batch_size",
        OutOfMemoryAtStart,
    ),
    Failing(
        "one rank's prefill, and the others' collective",
        READY + DECODES + hit(PREFILL, OUT_OF_MEMORY, rank=" TP5") + NCCL,
        "lower serving.chunked_prefill_size (4096, then 2048)",
        OutOfMemoryInPrefill,
    ),
    Failing(
        "decode",
        READY + PREFILLS + hit(DECODE, OUT_OF_MEMORY),
        "lower serving.max_running_requests",
        OutOfMemoryInDecode,
    ),
    Failing(
        "drafts verified",
        READY + PREFILLS + hit(VERIFY, OUT_OF_MEMORY),
        "lower serving.max_running_requests",
        OutOfMemoryInDecode,
    ),
    Failing(
        "replayed graph",
        READY
        + PREFILLS
        + hit(
            (*FORWARDS, ("model_executor/runner/decode_cuda_graph_runner.py", 1990, "execute", "self.replay()")),
            "torch.AcceleratorError: CUDA error: out of memory",
        ),
        "lower serving.max_running_requests",
        OutOfMemoryInDecode,
    ),
    Failing(
        "asynchronous, after a prefill",
        READY + DECODES + PREFILLS + hit(RUNS[:2], "RuntimeError: CUDA error: out of memory"),
        "lower serving.chunked_prefill_size",
        OutOfMemoryInPrefill,
    ),
    Failing(
        "asynchronous, in decoding",
        READY + PREFILLS + DECODES + hit(RUNS[:2], "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
        "lower serving.max_running_requests",
        OutOfMemoryInDecode,
    ),
    Failing(
        "no context",
        COMMAND + "\n" + hit(STARTING[:1], "RuntimeError: CUDA error: out of memory"),
        "./aerie server reap",
        OutOfMemoryAtStart,
    ),
    Failing(
        "no slots for a prompt",
        READY
        + DECODES
        + hit(
            (
                *RUNS[:2],
                ("managers/schedule_batch.py", 2914, "prepare_for_extend", "out_cache_loc = alloc_for_extend("),
            ),
            "RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 8192 tokens.",
        ),
        "lower serving.chunked_prefill_size",
        OutOfMemoryInPrefill,
    ),
    Failing(
        "no slots for the next tokens",
        READY
        + DECODES
        + hit(
            (*RUNS[:2], ("managers/schedule_batch.py", 3780, "prepare_for_decode", "alloc_for_decode(self)")),
            "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 148 tokens.\n"
            "Available tokens: 2048",
        ),
        "the KV pool has no slot for the next tokens",
        OutOfMemoryInDecode,
    ),
    Failing(
        "linear attention",
        LOADED
        + hit(
            POOLS,
            "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
            "max_mamba_cache_size=-3 (total_rest_memory=0.41 GB, mamba_cache_per_req=74.25 MB).",
        ),
        "lower serving.max_running_requests",
        OutOfMemoryInDecode,
    ),
    Failing(
        "leftovers",
        COMMAND
        + "\n"
        + hit(
            STARTING,
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            "pre_model_load_memory=41.2, local_gpu_memory=94.0, local_gpu_memory * 0.9=84.6",
        ),
        "./aerie server reap",
    ),
    Failing(
        "memory of a CPU server",
        LOADED
        + hit(
            POOLS,
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried "
            "to allocate 343597383680 bytes. Error code 12 (Cannot allocate memory)",
        ),
        "the host has no memory left",
    ),
    Failing(
        "full disk", COMMAND + "\n" + hit(STARTING, "OSError: [Errno 28] No space left on device"), "a disk is full"
    ),
    Failing(
        "taken port",
        READY + "[2026-11-30 00:06:05] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', "
        "8000): [errno 98] address already in use\n",
        "set serving.port",
        MachineNotReady,
        status=1,
    ),
    Failing(
        "taken port of the ranks",
        LOADING
        + hit(
            STARTING,
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
            "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        ),
        "another process listens on the port",
        MachineNotReady,
    ),
    Failing(
        "gated",
        COMMAND
        + "\n"
        + traceback(
            (),
            "OSError: You are trying to access a gated repo.\nMake sure to have access to it at "
            "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct.\n401 Client Error.\n\nCannot access gated repo "
            "for url https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct/resolve/main/config.json.",
        ),
        "set HF_TOKEN",
        status=1,
    ),
    Failing(
        "wrong path",
        COMMAND
        + "\n"
        + traceback(
            (),
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/models/nowhere'. Use `repo_type` argument if needed.",
        )
        + "The above exception was the direct cause of the following exception:\n\n"
        + traceback(
            (), "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/nowhere'."
        ),
        "verifier.path is not the folder of a whole checkpoint",
        status=1,
    ),
    Failing(
        "path without weights",
        LOADING + hit(LOADS, "RuntimeError: Cannot find any model weights with `/models/kimi`"),
        "verifier.path is not the folder of a whole checkpoint",
    ),
    Failing(
        "code of the checkpoint",
        COMMAND
        + "\n"
        + traceback(
            (),
            "ValueError: The repository /models/kimi contains custom code which must be executed to correctly load the "
            "model. You can inspect the repository content at /models/kimi .\n You can inspect the repository content "
            "at https://hf.co//models/kimi.\nPlease pass the argument `trust_remote_code=True` to allow custom code to "
            "be run.",
        ),
        "set verifier.trust_remote_code",
        status=1,
    ),
    Failing(
        "cut shard",
        LOADING
        + hit(
            LOADS,
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file "
            "not fully covered",
        ),
        "a file of the weights is cut or damaged",
        status=-9,  # the parent kills its whole tree, itself included
    ),
    Failing(
        "attention backend without a kernel for SM120",
        READY + PREFILLS + hit(PREFILL, "RuntimeError: TllmGenFmhaRunner: Unsupported architecture"),
        '"--attention-backend", "triton"',
    ),
    Failing(
        "attention backend of other GPUs",
        COMMAND
        + "\n"
        + traceback(
            (),
            "ValueError: TRTLLM MLA backend is only supported on Blackwell GPUs (SM100/SM12x). Please use a different "
            "backend.",
        ),
        '"flashinfer" ("trtllm_mla" has no prefill on SM120)',
        status=1,
    ),
    Failing(
        "old GPUs",
        LOADING + hit(LOADS, "RuntimeError: SGLang only supports sm75 and above."),
        "the GPUs are older",
    ),
    Failing(
        "another quantisation",
        COMMAND
        + "\n"
        + traceback(
            (),
            "ValueError: Quantization method specified in the model config (compressed-tensors) does not match the "
            "quantization method specified in the `quantization` argument (fp8).",
        ),
        "leave --quantization out of",
        status=1,
    ),
    Failing(
        "no drafter for this model",
        LOADED
        + hit(
            STARTING,
            "NotImplementedError: Model FooForCausalLM does not implement set_eagle3_layers_to_capture, which EAGLE3 aux "
            "hidden-state capture requires.",
        ),
        "cannot serve an EAGLE-3 drafter with this model",
    ),
    Failing(
        "tensors of another model",
        LOADING
        + hit(
            LOADS,
            "AssertionError: Attempted to load weight (torch.Size([4096, 7168])) into parameter (torch.Size([512, 7168]))",
        ),
        "a tensor has another shape than config.json says",
    ),
    Failing(
        "pages that do not divide",
        COMMAND + "\n" + traceback((), "AssertionError: chunked_prefill_size must be divisible by page_size"),
        "a multiple of serving.page_size",
        status=1,
    ),
    Failing(
        "a rank that did not finish",
        LOADED
        + hit(
            LOADS,
            "ValueError: TP rank 3 could finish the model loading, but there are other ranks that didn't finish loading. "
            "It is likely due to unexpected failures (e.g., OOM) or a slow node.",
        ),
        "the rank that failed first",
    ),
    Failing(
        "kernel of other GPUs",
        SIZED
        + hit(CAPTURES, "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"),
        "was not built for these GPUs",
    ),
    Failing(
        "old driver",
        COMMAND
        + "\n"
        + traceback(
            (),
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
            "driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx",
        ),
        "update the driver",
        status=1,
    ),
    Failing(
        "no GPU",
        COMMAND
        + "\n"
        + traceback(
            (),
            "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available.",
        ),
        "sees fewer GPUs than the plan has",
        status=1,
    ),
    Failing(
        "old kernel library",
        COMMAND
        + "\n"
        + traceback(
            (),
            "Exception: sglang-kernel with minimum required version 0.4.9 is not installed. Please reinstall the latest "
            "version with `pip install sglang-kernel --force-reinstall`",
        ),
        "a kernel library is missing",
        status=1,
    ),
    Failing(
        "missing kernel library",
        COMMAND
        + "\n"
        + traceback((), "ImportError: libnvrtc.so.13: cannot open shared object file: No such file or directory"),
        "a kernel library is missing",
        status=1,
    ),
    Failing(
        "missing module",
        COMMAND + "\n" + traceback((), "ModuleNotFoundError: No module named 'triton'"),
        "the serve environment is not complete",
        status=1,
    ),
    Failing(
        "unknown architecture",
        LOADING
        + hit(
            LOADS,
            "ValueError: Model architectures ['KimiK9ForCausalLM'] are not supported for now. Supported architectures: "
            "dict_keys(['LlamaForCausalLM'])",
        ),
        "does not know the model's architecture",
    ),
    Failing(
        "context too long",
        COMMAND
        + "\n"
        + traceback(
            (),
            "ValueError: Warning: User-specified context_length (1000000) is greater than the derived context_length "
            "(2048). This may lead to incorrect model outputs or CUDA errors.",
        ),
        "lower serving.context_length",
        status=1,
    ),
    Failing(
        "heads that ranks cannot share",
        LOADING + hit(LOADS, "AssertionError: 28 is not divisible by 8"),
        "change serving.tensor_parallel_size",
    ),
    Failing(
        "unknown argument",
        COMMAND + "\nusage: sglang serve [-h]\nsglang serve: error: unrecognized arguments: --no-such-flag\n",
        "correct serving.extra_arguments",
        status=2,
    ),
    Failing(
        "too many files",
        READY + hit(RUNS, "OSError: [Errno 24] Too many open files"),
        "ulimit -n",
    ),
    Failing(
        "illegal access",
        READY + DECODES + hit(RUNS, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        "a kernel failed on the GPU",
    ),
    Failing(
        "watchdog",
        READY
        + PREFILLS
        + "[2026-11-30 00:25:02 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
        + SIGQUIT
        + NCCL,
        "--watchdog-timeout",
    ),
    Failing(
        "ranks that lost each other",
        LOADING
        + hit(STARTING, "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
        "--shm-size",
    ),
    Failing(
        "killed while loading",
        LOADING
        + traceback(
            (),
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a "
            "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
        ),
        "dmesg -T | grep -i oom",
        status=1,
    ),
    Failing(
        "worker killed later",
        READY
        + DECODES
        + "[2026-11-30 00:20:02] Subprocess scheduler_0 (pid=8696) crashed with exit code -9. Triggering SIGQUIT for "
        "cleanup...\n[2026-11-30 00:20:02] SIGQUIT received. signum=3, frame=None. It usually means one child failed.\n",
        "dmesg -T | grep -i oom",
        status=-9,
    ),
    Failing("killed without a word", LOADING, "dmesg -T | grep -i oom", status=-9),
    Failing(
        "crash of native code",
        READY
        + DECODES
        + "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"
        + "[2026-11-30 00:20:02] Subprocess scheduler_0 (pid=8696) crashed with exit code -11. Triggering SIGQUIT for "
        "cleanup...\n",
        "native code crashed",
    ),
    Failing(
        "no compiler for kernels",
        LOADING + hit(STARTING, "RuntimeError: Ninja build failed. Ninja output:\n/bin/sh: 1: nvcc: not found"),
        "CUDA_HOME",
    ),
    Failing(
        "no toolkit",
        LOADING + hit(STARTING, "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA root."),
        "CUDA_HOME",
    ),
    Failing(
        "a kernel for larger GPUs",
        READY
        + hit(
            STARTING,
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: "
            "101376. Reducing block sizes or `num_stages` may help.",
        ),
        "another --moe-runner-backend",
    ),
    Failing(
        "GPUs that cannot read each other",
        LOADING + hit(STARTING, "RuntimeError: CUDART error: peer access is not supported between these two devices"),
        "--disable-custom-all-reduce",
    ),
    Failing(
        "no fabric manager",
        COMMAND
        + traceback(
            (),
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        ),
        "fabric manager",
    ),
    Failing(
        "shared memory of the host is full", LOADING + "Fatal Python error: Bus error\n\nThread 0x7f:\n", "--shm-size"
    ),
    Failing(
        "ranks on a slow network",
        LOADING
        + hit(
            STARTING,
            "Exception: Capture cuda graph failed: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:133] "
            "Timed out waiting 1800000ms for send operation to complete",
        ),
        "the ranks lost each other",
    ),
)
"""Each known failure at least once."""
