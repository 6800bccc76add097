"""A stand-in, in plain PyTorch, for SGLang's binary kernel library: lets real SGLang run without a GPU.

It is **not** the `sgl_kernel` that SGLang's authors publish. That one is a compiled library with CUDA builds only on
PyPI; its CPU build must be compiled for one processor family. SGLang 0.5.23 needs little of it on a CPU: the
functions that its modules import by name when `SGLANG_USE_CPU_ENGINE=1` (block tables and the tree of speculative
decoding), and two attention operators. Those are here, written from their call sites in SGLang, tested against naive
references and against transformers' greedy output. Everything else that a CPU server computes (norms, rotary
embedding, linear layers, experts, sampling) is SGLang's own PyTorch code.

What it is for: a demo and tests on any machine. It says nothing about the speed of SGLang.

`torch.ops.sgl_kernel.convert_weight_packed` is left undefined on purpose: SGLang takes it as the sign of the AMX
build (`cpu_has_amx_support`), and would then call kernels that are not here, on exactly those CPUs that have AMX.
"""

from sgl_kernel import attention as attention  # registers the two operators
from sgl_kernel.bookkeeping import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.speculative import (
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
