"""Each function against a loop over requests that says the same thing plainly."""

import torch
from sgl_kernel import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)

POOL_LEN = 40


def block_table() -> torch.Tensor:
    return torch.arange(8 * POOL_LEN, dtype=torch.int32).view(8, POOL_LEN)


def test_block_table_takes_new_slots_of_unequal_and_empty_ranges() -> None:
    rows, start, end = torch.tensor([5, 2, 7]), torch.tensor([3, 0, 10]), torch.tensor([6, 0, 11])
    slots = torch.tensor([900, 901, 902, 903, -1, -1])  # longer than needed, as the allocator may hand over
    table, expected = block_table(), block_table()
    expected[5, 3:6] = torch.tensor([900, 901, 902])
    expected[7, 10] = 903

    assign_req_to_token_pool_cpu(rows, table, start, end, slots, POOL_LEN)

    assert torch.equal(table, expected)


def test_extend_slots_are_gathered_request_after_request() -> None:
    table = block_table()
    rows, start, end = torch.tensor([1, 6]), torch.tensor([2, 30], dtype=torch.int32), torch.tensor([5, 32])
    out = torch.full((5,), -1, dtype=torch.int64)

    assign_extend_cache_locs_cpu(rows, table, start, end, out, POOL_LEN)

    assert out.tolist() == [*table[1, 2:5].tolist(), *table[6, 30:32].tolist()]


def test_draft_slots_follow_the_sequence() -> None:
    table = block_table()
    out = torch.full((2 * 2 * 3,), -1, dtype=torch.int64)

    assign_draft_cache_locs_contiguous_cpu(torch.tensor([3, 0]), table, torch.tensor([7, 11]), out, POOL_LEN, 2, 3)

    assert out.tolist() == [*table[3, 7:13].tolist(), *table[0, 11:17].tolist()]


def test_cache_rows_move_in_every_layer_even_where_source_and_target_overlap() -> None:
    layers = [torch.randn(10, 2, 3), torch.randn(10, 5).to(torch.bfloat16)]
    expected = [layer.clone() for layer in layers]
    source, target = torch.tensor([4, 5, 6]), torch.tensor([3, 4, 5])
    for layer in expected:
        layer[target] = layer[source].clone()
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.tensor([layer[0].numel() * layer.element_size() for layer in layers])

    copy_all_layer_kv_cache_cpu(pointers, strides, target, source)

    assert all(torch.equal(moved, wanted) for moved, wanted in zip(layers, expected, strict=True))


def test_bonus_token_is_the_last_accepted() -> None:
    tokens = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23])
    bonus = torch.zeros(2, dtype=torch.int32)

    fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3], dtype=torch.int32), bonus, 4)

    assert bonus.tolist() == [10, 22]


def test_accepted_slots_are_packed_to_the_front() -> None:
    out = torch.full((6,), -7, dtype=torch.int64)

    fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32), torch.arange(100, 106), out
    )

    assert out.tolist() == [100, 102, 103, -7, -7, -7]


def test_input_ids_rotate_within_each_request() -> None:
    tokens = torch.tensor([1, 2, 3, 9, 5, 6], dtype=torch.int64)

    rotate_input_ids_cpu(tokens, torch.tensor([0, 3, 4]), torch.tensor([3, 0, 2]), torch.tensor([[70], [71], [72]]))

    assert tokens.tolist() == [2, 3, 70, 9, 6, 72]


def test_rotation_puts_the_new_token_where_it_is_told() -> None:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])

    rotate_input_ids_cpu(
        tokens, torch.tensor([0, 3]), torch.tensor([3, 3]), torch.tensor([70, 71]), torch.tensor([1, 5])
    )

    assert tokens.tolist() == [2, 70, 3, 5, 6, 71]
