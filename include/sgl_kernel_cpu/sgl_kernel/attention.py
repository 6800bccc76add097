"""Attention over the paged KV cache, as the two operators that SGLang's `intel_amx` attention backend calls.

That backend (`srt/layers/attention/intel_amx_backend.py`) is the only CPU backend of SGLang 0.5.23 that knows
speculative decoding and latent (MLA) caches; despite its name it needs nothing of AMX but these operators.

Shapes: T query tokens, H query heads, G key/value heads (1 for a latent cache), D and E the widths of keys and values;
caches are [slots, G, D] and [slots, G, E]. Requests of similar length are padded to one length and computed together,
which is what makes 64 concurrent requests affordable. Suffixes name dimensions: b requests, m new tokens, l all tokens.
"""
# ruff: noqa: ARG001 - the signatures are those of the binary library; some of its arguments are of no use here.

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_SHORT = 64
"""Requests of up to this many tokens are padded together; longer ones with those of the same power of two."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _refuse(
    logit_cap: float, is_cross: bool, sinks: Tensor | None, cache: Tensor, window_and_tree: bool = False
) -> None:
    """Raise NotImplementedError for what the models of this project never ask of a CPU server."""
    asked = {
        "logit capping": logit_cap > 0,
        "cross attention": is_cross,
        "attention sinks": sinks is not None,
        "an fp8 KV cache": cache.dtype in _FLOAT8,
        "sliding window over a tree of drafts": window_and_tree,
    }
    for what, wanted in asked.items():
        if wanted:
            raise NotImplementedError(f"the CPU stand-in for sgl_kernel has no {what}")


def _groups(query_lens: Iterable[int], key_lens: Iterable[int]) -> list[Tensor]:
    """Indices of the requests that can share one padded batch: same query length, similar key length."""
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        if queries:
            groups[queries, max(keys, _SHORT).bit_length()].append(index)
    return [torch.tensor(members) for members in groups.values()]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention of [B, M, H, D] queries over [B, L, G, D] keys and [B, L, G, E] values, to [B, M, H, E].

    `mask` bool [B, M, L] says what each query may see. The H / G heads of a group are laid out as further queries of
    one key/value head: twice as fast here as letting PyTorch repeat the keys.
    """
    batch, queries, heads, width = query.shape
    kv_heads = key.shape[2]
    shared = heads // kv_heads
    query = query.view(batch, queries, kv_heads, shared, width).permute(0, 2, 1, 3, 4)
    query = query.reshape(batch, kv_heads, queries * shared, width)
    mask = mask[:, None, :, None, :].expand(-1, -1, -1, shared, -1).reshape(batch, 1, queries * shared, -1)
    out = scaled_dot_product_attention(
        query,
        key.to(query.dtype).transpose(1, 2),
        value.to(query.dtype).transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    out = out.view(batch, kv_heads, queries, shared, -1).permute(0, 2, 1, 3, 4)
    return out.reshape(batch, queries, heads, -1)


def _slots(req_to_token: Tensor, rows_b: Tensor, lengths_b: Tensor) -> Tensor:
    """Slots of the requests' tokens, int64 [B, L], each padded with its first: past its end a row holds anything."""
    position = torch.arange(int(lengths_b.max()))
    slots_bl = req_to_token[rows_b, : position.numel()].to(torch.int64)
    return torch.where(position < lengths_b[:, None], slots_bl, slots_bl[:, :1])


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """Cache rows of the slots [B, L], as [B, L, G, width]."""
    return cache.index_select(0, slots.view(-1)).view(*slots.shape, *cache.shape[1:])


def _decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token per request: store its key and value at `loc`, attend to all its tokens, fill `output [T, H, E]`.

    `window > 0` limits each query to the last `window` tokens. A latent cache keeps values as a part of the keys (the
    same memory), so that storing the keys stores both. `attn_logits` is scratch space of the binary kernel, unused.
    """
    _refuse(logit_cap, is_cross, sinks, k_cache)
    if key is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        if value is not None and v_cache.data_ptr() != k_cache.data_ptr():
            v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for members in _groups([1] * seq_lens.numel(), seq_lens.tolist()):
        lengths_b = seq_lens[members].to(torch.int64)
        position = torch.arange(int(lengths_b.max()))
        mask_bl = position < lengths_b[:, None]
        if window > 0:
            mask_bl &= position >= (lengths_b - window)[:, None]
        slots_bl = _slots(req_to_token, req_pool_indices[members], lengths_b)
        out = _attend(
            query[members][:, None], _rows(k_cache, slots_bl), _rows(v_cache, slots_bl), mask_bl[:, None], sm_scale
        )
        output[members] = out[:, 0].to(output.dtype)


def _extend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len: int,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The last `extend_seq_lens[b]` of `seq_lens[b]` tokens are new (prefill, or drafts to verify); fill `o`.

    The caller has stored the new keys and values in the cache already. For a latent cache with nothing cached before,
    SGLang expands them to all heads itself and passes them as `k` and `v`, of another width than the cache: then those
    count. `tree_mask` bool, one M x M block per request, replaces causality among the new tokens.
    """
    _refuse(logit_cap, is_cross, sinks, k_buffer, window > 0 and tree_mask is not None)
    cached = (q.shape[0] * k_buffer[0].numel(), q.shape[0] * v_buffer[0].numel())
    expanded = None
    if k is not None and v is not None and (k.numel(), v.numel()) != cached:
        expanded = k.view(*q.shape[:2], -1), v.view(*o.shape[:2], -1)
    new_lens, all_lens = extend_seq_lens.tolist(), seq_lens.tolist()
    if expanded is not None and new_lens != all_lens:
        raise NotImplementedError("expanded keys and values beside a cached prefix")
    blocks = None
    if tree_mask is not None:
        blocks = tree_mask.view(-1)[: len(new_lens) * max_len * max_len].view(-1, max_len, max_len).bool()

    for members in _groups(new_lens, all_lens):
        new = new_lens[int(members[0])]
        lengths_b = seq_lens[members].to(torch.int64)
        position = torch.arange(int(lengths_b.max()))
        own_bm = (lengths_b - new)[:, None] + torch.arange(new)  # the position of each new token
        mask_bml = (position < lengths_b[:, None])[:, None, :].repeat(1, new, 1)
        if blocks is not None:
            mask_bml.scatter_(2, own_bm[:, None, :].expand(-1, new, -1), blocks[members])
        elif is_causal:
            mask_bml &= position <= own_bm[:, :, None]
            if window > 0:
                mask_bml &= position > own_bm[:, :, None] - window
        rows_bm = extend_start_loc[members].to(torch.int64)[:, None] + torch.arange(new)
        if expanded is not None:
            keys, values = expanded[0][rows_bm], expanded[1][rows_bm]
        else:
            slots_bl = _slots(req_to_token, req_pool_indices[members], lengths_b)
            keys, values = _rows(k_buffer, slots_bl), _rows(v_buffer, slots_bl)
        o[rows_bm] = _attend(q[rows_bm], keys, values, mask_bml, sm_scale).to(o.dtype)


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross, int window, "
    "Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_LIBRARY.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len, float sm_scale, float logit_cap, bool is_cross, "
    "int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
_LIBRARY.impl("decode_attention_cpu", _decode, "CPU")
_LIBRARY.impl("extend_attention_cpu", _extend, "CPU")
