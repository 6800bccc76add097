"""The tree of drafts against references that walk one request at a time, in the order of SGLang's Triton kernels."""

from dataclasses import dataclass

import pytest
import torch
from sgl_kernel import build_draft_decode_metadata_cpu, build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from sgl_kernel.speculative import QLEN_ONLY


@dataclass
class Tree:
    """What the builder fills, for B requests of N nodes."""

    mask: torch.Tensor
    positions: torch.Tensor
    index: torch.Tensor
    child: torch.Tensor
    sibling: torch.Tensor


def empty_tree(batch: int, nodes: int) -> Tree:
    index, child, sibling = torch.full((3, batch, nodes), -1, dtype=torch.int64)
    mask = torch.ones(batch * nodes * nodes, dtype=torch.bool)
    return Tree(mask, torch.zeros(batch * nodes, dtype=torch.int64), index, child, sibling)


def build(parents: torch.Tensor, selected: torch.Tensor, lengths: torch.Tensor, topk: int, depth: int) -> Tree:
    nodes = selected.shape[1] + 1
    tree = empty_tree(lengths.numel(), nodes)
    build_tree_kernel_efficient_cpu(
        parents, selected, lengths, tree.mask, tree.positions, tree.index, tree.child, tree.sibling, topk, depth, nodes,
        QLEN_ONLY,
    )  # fmt: skip
    return tree


def reference(parents: torch.Tensor, selected: torch.Tensor, lengths: torch.Tensor, topk: int, depth: int) -> Tree:
    batch, nodes = lengths.numel(), selected.shape[1] + 1
    tree = empty_tree(batch, nodes)
    for b in range(batch):
        chosen = selected[b].tolist()

        def parent(node: int, b: int = b, chosen: list[int] = chosen) -> int | None:
            group = chosen[node - 1] // topk
            if group == 0:
                return 0
            candidate = int(parents[b, group])
            return chosen.index(candidate) + 1 if candidate in chosen else None

        for node in range(nodes - 1, 0, -1):
            above = parent(node)
            if above is not None:
                tree.sibling[b, node] = tree.child[b, above]
                tree.child[b, above] = node
        for node in range(nodes):
            row = torch.zeros(nodes, dtype=torch.bool)
            row[0] = True
            walk, steps = node, 0
            while walk and steps < depth:
                steps += 1
                row[walk] = True
                walk = parent(walk) or 0
            tree.mask[(b * nodes + node) * nodes :][:nodes] = row
            tree.positions[b * nodes + node] = lengths[b] + steps
        tree.index[b] = torch.arange(b * nodes, (b + 1) * nodes)
    return tree


def drafted(batch: int, topk: int, steps: int, nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents and selection as SGLang's drafting makes them: each step expands topk candidates into topk each."""
    generator = torch.Generator().manual_seed(seed)
    parents = [torch.arange(-1, topk).repeat(batch, 1)]
    for step in range(1, steps):
        offset = topk + topk * topk * (step - 1)
        kept = torch.rand(batch, topk * topk, generator=generator).topk(topk).indices
        parents.append(offset + kept)
    candidates = topk + topk * topk * (steps - 1)
    selected = torch.rand(batch, candidates, generator=generator).topk(nodes - 1).indices.sort().values
    return torch.cat(parents[:-1], dim=1) if steps > 1 else torch.empty(batch, 0, dtype=torch.int64), selected


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 4), (1, 1, 2), (2, 3, 6), (4, 3, 8), (3, 4, 12)])
def test_tree_equals_reference(topk: int, steps: int, nodes: int) -> None:
    parents, selected = drafted(batch=5, topk=topk, steps=steps, nodes=nodes, seed=nodes)
    lengths = torch.tensor([7, 1, 30, 12, 5])

    built, expected = (function(parents, selected, lengths, topk, steps) for function in (build, reference))

    for field, value in vars(expected).items():
        assert torch.equal(getattr(built, field), value), field


def test_other_mask_layouts_are_refused() -> None:
    tree = empty_tree(1, 2)
    with pytest.raises(NotImplementedError, match="QLEN_ONLY"):
        build_tree_kernel_efficient_cpu(
            torch.empty(1, 0), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1]), tree.mask, tree.positions,
            tree.index, tree.child, tree.sibling, 1, 1, 2, 0,
        )  # fmt: skip


def verify(tree: Tree, candidates: torch.Tensor, target: torch.Tensor, steps: int) -> tuple[torch.Tensor, ...]:
    batch, nodes = candidates.shape
    predicts = torch.full((batch * nodes,), -1, dtype=torch.int32)
    accepted = torch.full((batch, steps + 1), -1, dtype=torch.int32)
    number = torch.zeros(batch, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=number,
        candidates=candidates,
        retrive_index=tree.index,
        retrive_next_token=tree.child,
        retrive_next_sibling=tree.sibling,
        target_predict=target,
    )
    return predicts, accepted, number


def reference_verify(
    tree: Tree, candidates: torch.Tensor, target: torch.Tensor, steps: int
) -> tuple[torch.Tensor, ...]:
    batch, nodes = candidates.shape
    predicts = torch.full((batch * nodes,), -1, dtype=torch.int32)
    accepted = torch.full((batch, steps + 1), -1, dtype=torch.int32)
    number = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        node, path = 0, [0]
        while len(path) <= steps:
            child = int(tree.child[b, node])
            while child != -1 and candidates[b, child] != target[b, node]:
                child = int(tree.sibling[b, child])
            if child == -1:
                break
            node = child
            path.append(node)
        for place, node in enumerate(path):
            predicts[b * nodes + node] = target[b, node]
            accepted[b, place] = b * nodes + node
        number[b] = len(path) - 1
    return predicts, accepted, number


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 4), (2, 3, 8), (4, 3, 10)])
def test_verification_equals_reference_over_many_random_trees(topk: int, steps: int, nodes: int) -> None:
    longest = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        parents, selected = drafted(batch=6, topk=topk, steps=steps, nodes=nodes, seed=seed)
        tree = build(parents, selected, torch.arange(1, 7), topk, steps)
        candidates, target = torch.randint(0, 3, (2, 6, nodes), generator=generator)  # few tokens: many matches

        found, expected = (function(tree, candidates, target, steps) for function in (verify, reference_verify))

        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        longest = max(longest, int(expected[2].max()))
    assert longest == steps  # whole chains were accepted too


@pytest.mark.parametrize("topk", [1, 3])
def test_draft_block_table_has_a_row_per_branch(topk: int) -> None:
    table = torch.arange(4 * 50, dtype=torch.int32).view(4, 50)
    rows, lengths, steps = torch.tensor([2, 0]), torch.tensor([5, 9]), 3

    drafts = build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, 50)

    for b, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            own = table[row, length + branch * steps : length + (branch + 1) * steps]
            expected = torch.cat((table[row, :length], own))
            assert torch.equal(drafts[b * topk + branch, : length + steps], expected)
