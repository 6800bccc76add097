"""The two attention operators against softmax written out, one query and one head at a time."""

import pytest
import sgl_kernel  # noqa: F401 - registers the operators
import torch

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
SLOTS, POOL_LEN = 600, 300


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: list[int], scale: float
) -> torch.Tensor:
    """One query [H, D] over the tokens ``seen`` of [L, G, D] keys and [L, G, E] values."""
    shared = query.shape[0] // keys.shape[1]
    heads = []
    for head in range(query.shape[0]):
        scores = torch.tensor([scale * float(query[head] @ keys[at, head // shared]) for at in seen])
        heads.append(sum(share * values[at, head // shared] for share, at in zip(scores.softmax(0), seen, strict=True)))
    return torch.stack(heads)


class Cache:
    """A paged cache of requests whose slots are scattered; entries past a request's end are out of range."""

    def __init__(self, lengths: list[int], *, kv_heads: int = KV_HEADS, widths: tuple[int, int] = (WIDTH, VALUE_WIDTH)):
        torch.manual_seed(sum(lengths))
        self.lengths = torch.tensor(lengths)
        self.keys = torch.randn(SLOTS, kv_heads, widths[0])
        self.values = torch.randn(SLOTS, kv_heads, widths[1])
        self.table = torch.full((len(lengths) + 2, POOL_LEN), 10 * SLOTS, dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
        free = torch.randperm(SLOTS)
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.table[row, :length], free = free[:length].int(), free[length:]

    def slots(self, request: int) -> torch.Tensor:
        return self.table[self.rows[request], : self.lengths[request]].long()

    def of(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[self.slots(request)], self.values[self.slots(request)]

    def decode(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, window: int = 0
    ) -> torch.Tensor:
        out = torch.full((query.shape[0], query.shape[1], self.values.shape[2]), torch.nan)
        last = torch.stack([self.slots(request)[-1] for request in range(len(self.lengths))])
        torch.ops.sgl_kernel.decode_attention_cpu(
            query, self.keys, self.values, 1.0, 1.0, out, key, value, last, torch.empty(0), self.table, self.rows,
            self.lengths, 0.3, 0.0, False, window, None, None,
        )  # fmt: skip
        return out

    def extend(
        self,
        query: torch.Tensor,
        new: list[int],
        *,
        expanded: tuple[torch.Tensor, torch.Tensor] | None = None,
        tree_mask: torch.Tensor | None = None,
        causal: bool = True,
        window: int = 0,
        value_width: int | None = None,
    ) -> torch.Tensor:
        starts = torch.tensor(new).cumsum(0) - torch.tensor(new)
        out = torch.full((query.shape[0], query.shape[1], value_width or self.values.shape[2]), torch.nan)
        key, value = expanded or (None, None)
        torch.ops.sgl_kernel.extend_attention_cpu(
            query, key, value, out, self.keys, self.values, 1.0, 1.0, self.table, self.rows, self.lengths,
            torch.tensor(new, dtype=torch.int32), starts.int(), max(new), 0.3, 0.0, False, window, None, None,
            tree_mask, causal,
        )  # fmt: skip
        return out


@pytest.mark.parametrize("window", [0, 5])
def test_decode_stores_the_new_token_and_attends_to_all_or_to_the_window(window: int) -> None:
    cache = Cache([3, 70, 1, 260, 68])
    query, key, value = (
        torch.randn(5, HEADS, WIDTH),
        torch.randn(5, KV_HEADS, WIDTH),
        torch.randn(5, KV_HEADS, VALUE_WIDTH),
    )

    out = cache.decode(query, key.flatten(1), value.flatten(1), window)

    for request, length in enumerate(cache.lengths.tolist()):
        keys, values = cache.of(request)
        assert torch.equal(keys[-1], key[request])
        assert torch.equal(values[-1], value[request])
        seen = list(range(max(0, length - window) if window else 0, length))
        torch.testing.assert_close(out[request], attend(query[request], keys, values, seen, 0.3))


def test_decode_of_a_latent_cache_stores_keys_only_because_values_are_part_of_them() -> None:
    cache = Cache([4, 9], kv_heads=1, widths=(WIDTH, VALUE_WIDTH))
    cache.values = cache.keys[..., :VALUE_WIDTH]
    query, key = torch.randn(2, HEADS, WIDTH), torch.randn(2, 1, WIDTH)

    out = cache.decode(query, key, torch.full((2, 1, VALUE_WIDTH), torch.nan))

    for request, length in enumerate(cache.lengths.tolist()):
        keys, values = cache.of(request)
        assert torch.equal(keys[-1], key[request])
        torch.testing.assert_close(out[request], attend(query[request], keys, values, list(range(length)), 0.3))


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 4), (False, 0)])
def test_extend_attends_to_the_cached_prefix_and_to_new_tokens(causal: bool, window: int) -> None:
    cache = Cache([6, 90, 5, 90])
    new = [6, 3, 1, 3]  # a whole prompt, two chunks of the same shape, one token
    query = torch.randn(sum(new), HEADS, WIDTH)

    out = cache.extend(query, new, causal=causal, window=window)

    at = 0
    for request, (length, number) in enumerate(zip(cache.lengths.tolist(), new, strict=True)):
        for position in range(length - number, length):
            end = position + 1 if causal else length
            seen = list(range(max(0, end - window) if window else 0, end))
            torch.testing.assert_close(out[at], attend(query[at], *cache.of(request), seen, 0.3))
            at += 1


def test_extend_with_a_tree_lets_a_draft_see_its_ancestors_only() -> None:
    cache, nodes = Cache([20, 11, 75]), 3
    trees = torch.rand(3, nodes, nodes) > 0.5
    trees |= torch.eye(nodes, dtype=torch.bool)
    query = torch.randn(3 * nodes, HEADS, WIDTH)

    out = cache.extend(query, [nodes] * 3, tree_mask=trees.flatten())

    for request, length in enumerate(cache.lengths.tolist()):
        prefix = list(range(length - nodes))
        for node in range(nodes):
            seen = prefix + [length - nodes + other for other in range(nodes) if trees[request, node, other]]
            at = request * nodes + node
            torch.testing.assert_close(out[at], attend(query[at], *cache.of(request), seen, 0.3))


def test_extend_of_a_latent_cache_takes_expanded_keys_where_nothing_is_cached() -> None:
    cache, new = Cache([5, 8], kv_heads=1, widths=(10, 7)), [5, 8]
    query, keys, values = (torch.randn(13, HEADS, width) for width in (WIDTH, WIDTH, VALUE_WIDTH))

    out = cache.extend(query, new, expanded=(keys, values), value_width=VALUE_WIDTH)

    for start, number in ((0, 5), (5, 8)):
        own = slice(start, start + number)
        for position in range(number):
            expected = attend(query[start + position], keys[own], values[own], list(range(position + 1)), 0.3)
            torch.testing.assert_close(out[start + position], expected)


def test_expanded_keys_beside_a_cached_prefix_are_refused() -> None:
    cache = Cache([5, 8], kv_heads=1, widths=(10, 7))
    query, keys, values = (torch.randn(9, HEADS, width) for width in (WIDTH, WIDTH, VALUE_WIDTH))

    with pytest.raises(NotImplementedError, match="cached prefix"):
        cache.extend(query, [5, 4], expanded=(keys, values), value_width=VALUE_WIDTH)


def test_what_is_missing_is_refused_by_name() -> None:
    cache = Cache([4])
    query = torch.randn(1, HEADS, WIDTH)
    with pytest.raises(NotImplementedError, match="sliding window over a tree"):
        cache.extend(query, [1], window=3, tree_mask=torch.ones(1, dtype=torch.bool))
    cache.keys = cache.keys.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="fp8 KV cache"):
        cache.decode(query, None, None)


@pytest.mark.slow  # importing SGLang takes a while
def test_sglang_does_not_take_the_stand_in_for_the_amx_build_on_a_cpu_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "is_amx_tile_supported", True)
    assert common._is_intel_amx_backend_available() is False
    assert not common.cpu_has_amx_support()
