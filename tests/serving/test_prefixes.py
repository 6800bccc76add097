"""How much of prompts a prefix cache can save."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from aerie.serving.prefixes import prefix_overlap


def as_prompts(*prompts: list[int]) -> list["array[int]"]:
    return [array("i", prompt) for prompt in prompts]


def test_a_shared_beginning_is_counted_once_and_an_equal_middle_is_not() -> None:
    overlap = prefix_overlap(as_prompts([1, 2, 3, 4], [1, 2, 9], [7, 2, 3]))
    assert (overlap.prompts, overlap.tokens, overlap.shared_tokens, overlap.distinct_tokens) == (3, 10, 2, 8)


def test_no_prompts_share_nothing() -> None:
    assert prefix_overlap([]).share == 0


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_what_is_not_shared_is_the_nodes_of_a_tree_of_all_prefixes(prompts: list[list[int]]) -> None:
    nodes = {tuple(prompt[: length + 1]) for prompt in prompts for length in range(len(prompt))}
    assert prefix_overlap(as_prompts(*prompts)).distinct_tokens == len(nodes)
