from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aerie.prompts.identity import chosen, content_hash, draw, sample_id, split_of
from aerie.settings.pipeline import SplitSettings

SHARES = SplitSettings(validation=0.1, benchmark=0.05)


def test_splits_have_their_shares_and_depend_on_the_conversation_alone() -> None:
    splits = [split_of(f"conversation-{i}", SHARES) for i in range(20_000)]
    counts = Counter(splits)

    assert abs(counts["validation"] / 20_000 - 0.1) < 0.01
    assert abs(counts["benchmark"] / 20_000 - 0.05) < 0.01
    assert splits == [split_of(f"conversation-{i}", SHARES) for i in range(20_000)]


def test_a_larger_validation_share_never_moves_a_benchmark_conversation() -> None:
    """What was held out for the benchmark stays held out of training."""
    more = SplitSettings(validation=0.3, benchmark=0.05)
    for i in range(2_000):
        if split_of(str(i), SHARES) == "benchmark":
            assert split_of(str(i), more) == "benchmark"


@given(st.text())
def test_prompts_that_differ_in_white_space_or_composition_are_one(text: str) -> None:
    assume_encodable = text.encode("utf-8", "replace").decode()
    assert content_hash([f" {assume_encodable}\n\n\u0065\u0301 "]) == content_hash([f"{assume_encodable} \t\u00e9"])


def test_prompts_that_differ_in_case_are_two() -> None:
    assert content_hash(["Pi"]) != content_hash(["pi"])


@given(st.text(max_size=200), st.integers(0, 500))
def test_sample_ids_are_safe_file_names(source_id: str, turn: int) -> None:
    source_id = source_id.encode("utf-8", "replace").decode()
    identity = sample_id("B7_sharegpt", source_id, turn, "0" * 64)

    assert identity.startswith("B7_sharegpt-")
    assert "/" not in identity
    assert len(identity) < 160


def test_the_turn_is_drawn_among_all_and_by_the_seed() -> None:
    positions = [2, 4, 6, 8]
    drawn = Counter(chosen(positions, seed=1, conversation_id=str(i)) for i in range(4_000))

    assert all(abs(drawn[position] - 1_000) < 150 for position in positions)
    assert any(
        chosen(positions, seed=1, conversation_id=str(i)) != chosen(positions, seed=2, conversation_id=str(i))
        for i in range(20)
    )


def test_ranks_fit_the_column() -> None:
    assert all(0 <= draw("rank", i) < 2**63 for i in range(1_000))
