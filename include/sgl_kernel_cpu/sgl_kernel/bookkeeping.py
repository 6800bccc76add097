"""Which KV-cache slot holds which token: copies between the block table and flat lists of slots.

Names and argument order are those of SGLang's call sites (`srt/mem_cache/allocation.py`, `kernels/ops/speculative/
{cache_locs,eagle,multi_layer_eagle}.py`, `kernels/ops/kvcache/cache_move.py`). Shapes: B requests, P rows of the
block table `req_to_token [P, pool_len]`. All functions write into their `mutable` arguments and return nothing.
"""
# ruff: noqa: ARG001 - the signatures are those of the binary library; some of its arguments are of no use here.

import ctypes

import torch
from torch import Tensor


def _ragged(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of B half-open ranges `[start, start + length)`, one after another.

    Returns (owner, position), both int64 [sum(lengths)]: the range that each entry belongs to, and its index.
    """
    lengths = lengths.to(torch.int64)
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    first = torch.cumsum(lengths, 0) - lengths  # where each range begins in the flat result
    position = torch.arange(owner.numel()) - first[owner] + starts.to(torch.int64)[owner]
    return owner, position


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the block table (every decode step).

    `req_to_token[req_pool_indices[b], start[b]:end[b]]` (mutable) takes the next `end[b] - start[b]` slots of
    `out_cache_loc`, request after request.
    """
    owner, column = _ragged(start_offset, end_offset - start_offset)
    req_to_token[req_pool_indices[owner], column] = out_cache_loc[: owner.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The inverse: gather `req_to_token[row, start:end]` of each request into `out_cache_loc` (mutable, 1-D)."""
    owner, column = _ragged(start_offset, end_offset - start_offset)
    out_cache_loc[: owner.numel()] = req_to_token[req_pool_indices[owner], column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Gather the `topk * num_steps` slots after each sequence's end into `out_cache_loc` (mutable)."""
    columns = seq_lens.to(torch.int64)[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices[:, None], columns]
    out_cache_loc.view(-1)[: slots.numel()] = slots.view(-1).to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy cache rows `src_loc` to `tgt_loc` in every layer's buffer, all rows read before any is written.

    `data_ptrs` are the addresses of the buffers (uint64 [layers]) and `strides` the bytes per row of each.
    """
    if tgt_loc.numel() == 0:
        return
    rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)
        buffer[tgt_loc] = buffer[src_loc]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """`bonus_tokens[b]` (mutable) = the last accepted of request b's `accept_stride` candidate tokens."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens[: accept_lens.numel()] = accept_tokens.view(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the slots of accepted tokens to the front of `accept_out_cache_loc` (mutable); -1 is not accepted."""
    accepted = accept_index.view(-1)
    accepted = accepted[accepted > -1].to(torch.int64)
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one in `input_ids` (mutable) and append its new token.

    The new token goes to the request's last position, or to `select_index[b]` (an index into `input_ids`) where that
    is given. Requests of length 0 are left alone.
    """
    starts, lengths = extend_start_loc.to(torch.int64), extend_seq_lens.to(torch.int64)
    some = lengths > 0
    _, position = _ragged(starts[some], lengths[some] - 1)
    input_ids[position] = input_ids[position + 1]
    last = starts + lengths - 1 if select_index is None else select_index.to(torch.int64)
    input_ids[last[some]] = topk_index.view(-1)[some].to(input_ids.dtype)
