"""The tree of draft tokens: building it, and verifying it greedily.

Names and argument order are those of SGLang's call sites (`kernels/ops/speculative/spec_tree.py`,
`srt/layers/attention/intel_amx_backend.py`); the semantics follow the Triton kernels beside those call sites.
Shapes: B requests, N draft tokens per request, the root (last verified token) being node 0. A chain is a tree whose
`topk` is 1. Loops run over the N nodes and never over requests.
"""

import torch
from torch import Tensor

QLEN_ONLY = 1
"""`TreeMaskMode.QLEN_ONLY`: the only mask layout that SGLang asks for on a CPU, one N x N block per request."""


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """The parent node of each node, int64 [B, N]; -1 where there is none (the root, or an unselected parent).

    `selected_index [B, N - 1]` are candidate numbers; candidate c belongs to group c // topk, whose parent is the root
    for group 0 and candidate `parent_list[b, group]` otherwise.
    """
    batch, others = selected_index.shape
    group = selected_index // topk
    parent = torch.zeros((batch, others), dtype=torch.int64)
    if parent_list.numel():
        candidate = parent_list.gather(1, group)
        same = selected_index[:, None, :] == candidate[:, :, None]  # [B, node, possible parent]
        parent = torch.where(same.any(-1), same.int().argmax(-1) + 1, -1)
        parent = torch.where(group == 0, 0, parent)
    return torch.cat((torch.full((batch, 1), -1), parent), dim=1)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill `tree_mask`, `positions` and the three `retrive_*` tables (all mutable) from the selected candidates.

    - `tree_mask` bool [B * N * N]: node i sees itself, its ancestors and the root.
    - `positions` int64 [B * N]: sequence length plus the node's depth.
    - `retrive_index` int64 [B, N]: the node's row in the flat batch; `retrive_next_token`: first child, or -1;
      `retrive_next_sibling`: next child of the same parent, or -1.

    Raises NotImplementedError for another mask layout than QLEN_ONLY.
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: only QLEN_ONLY ({QLEN_ONLY}) exists on a CPU")
    nodes = draft_token_num
    batch = verified_seq_len.numel()
    parent = _parents(parent_list, selected_index, topk)
    request = torch.arange(batch)

    # A last column takes the writes of nodes without a parent. Going down the nodes makes the first child the lowest.
    first_child = torch.full((batch, nodes + 1), -1)
    for node in range(nodes - 1, 0, -1):
        above = torch.where(parent[:, node] < 0, nodes, parent[:, node])
        retrive_next_sibling[:, node] = torch.where(above < nodes, first_child[request, above], -1)
        first_child[request, above] = node
    retrive_next_token.copy_(first_child[:, :nodes])
    retrive_index.copy_(torch.arange(batch * nodes).view(batch, nodes))

    visible = torch.zeros((batch, nodes, nodes), dtype=torch.bool)
    visible[:, :, 0] = True
    level = torch.zeros((batch, nodes), dtype=torch.int64)
    ancestor = torch.arange(nodes).repeat(batch, 1)
    for _ in range(depth):
        level += ancestor > 0
        visible.scatter_(2, ancestor[:, :, None], True)  # a walk that has ended stands at the root, visible anyway
        ancestor = parent.gather(1, ancestor).clamp(min=0)
    positions.view(-1)[: batch * nodes] = (verified_seq_len.to(torch.int64)[:, None] + level).view(-1)
    tree_mask.view(-1)[: visible.numel()] = visible.view(-1)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from its root as long as a child is the token that the target itself predicts.

    `candidates` and `target_predict` are [B, N]: the draft token at each node, and the target's next token after it.
    Mutable: `predicts [>= B * N]` gets the target's token at every accepted node (the last is the bonus token),
    `accept_index [B, S]` the accepted rows of the flat batch in order (the caller fills it with -1), and
    `accept_token_num [B]` the number of accepted draft tokens, the root not counted.
    """
    target = target_predict.reshape(-1).to(torch.int64)
    request = torch.arange(candidates.shape[0])
    last = retrive_index[:, 0].to(torch.int64)
    accept_index[:, 0] = last.to(accept_index.dtype)
    accepted = torch.zeros_like(last)
    node = torch.zeros_like(last)
    walking = torch.ones_like(last, dtype=torch.bool)
    for _ in range(1, accept_index.shape[1]):
        node = torch.where(walking, retrive_next_token[request, node], -1)
        wanted = target[last]
        while True:  # at most N turns: a list of siblings is finite
            other = (node >= 0) & (candidates[request, node] != wanted)
            if not other.any():
                break
            node = torch.where(other, retrive_next_sibling[request, node], node)
        walking = node >= 0
        if not walking.any():
            break
        hit = request[walking]
        predicts[last[hit]] = wanted[hit].to(predicts.dtype)
        last[hit] = retrive_index[hit, node[hit]].to(torch.int64)
        accepted[hit] += 1
        accept_index[hit, accepted[hit]] = last[hit].to(accept_index.dtype)
    accept_token_num.copy_(accepted)
    predicts[last] = target[last].to(predicts.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A block table with one row per branch of the draft: the request's own slots, then the branch's.

    Returns [B * topk, width], as wide as the longest branch: branch t of a request of length n continues with the
    slots `n + t * num_steps ... n + (t + 1) * num_steps - 1` of the request's row.
    """
    lengths = seq_lens.to(torch.int64)
    width = min(pool_len, int(lengths.max()) + num_steps)
    table = req_to_token[req_pool_indices, :width].repeat_interleave(topk, 0)
    if topk > 1:  # the first branch's slots already follow the prefix
        owner = torch.arange(lengths.numel()).repeat_interleave(topk)
        branch = torch.arange(topk).repeat(lengths.numel())
        step = torch.arange(num_steps)
        to = lengths[owner][:, None] + step
        table.scatter_(1, to, req_to_token[req_pool_indices[owner][:, None], to + branch[:, None] * num_steps])
    return table
