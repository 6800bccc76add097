"""Which partings of greedy outputs rounding explains."""

import pytest

from aerie.benchmark.losslessness import Parting, Share, judge
from aerie.benchmark.measures import Divergence

LIKELY = {7: -0.50, 9: -0.54, 4: -3.0}


def parting(*, own=7, other=9, likely=LIKELY):
    return Parting(Divergence("B1", "a", 5, own, other), likely)


@pytest.mark.parametrize(
    ("own", "other", "likely", "tie"),
    [
        (7, 9, {7: -0.50, 9: -0.54}, True),
        (9, 7, {7: -0.50, 9: -0.54}, True),
        (7, 9, {7: -0.50, 9: -0.56}, False),
        (9, 4, {7: -0.50, 9: -0.52, 4: -0.54}, True),  # three as good as each other
        (7, 4, {7: -0.50, 9: -0.51, 4: -0.60}, False),  # two tie, but one of them is not what was said
        (7, 8, {7: -0.50, 9: -0.51}, False),  # not among the likeliest at all
        (7, None, {7: -0.50, 9: -0.51}, False),  # the other output just ended
        (7, 9, None, False),  # nobody asked
    ],
)
def test_a_tie_is_two_tokens_within_a_twentieth_of_a_nat_of_the_likeliest(own, other, likely, tie):
    assert parting(own=own, other=other, likely=likely).is_tie is tie


@pytest.mark.parametrize(
    ("partings", "exact", "own", "verdict"),
    [
        ([], True, None, "identical"),
        ([], False, Share(0, 32), "identical"),
        ([parting()], True, None, "changed"),  # a tie is no excuse in float32
        ([parting()], False, Share(1, 32), "ties"),
        ([parting()], False, Share(0, 32), "changed"),  # one more is more often, by chance or not
        ([parting()], False, Share(1, 33), "changed"),
        ([parting()] * 2, False, Share(3, 48), "ties"),  # the same share of another number
        ([parting()], False, None, "changed"),  # nobody counted the verifier's own
        ([parting()] * 12, False, Share(1, 32), "changed"),
        ([parting()] * 12, False, Share(12, 32), "ties"),
        ([parting(), parting(other=4)], False, Share(12, 32), "changed"),  # one that no tie explains is enough
    ],
)
def test_in_lower_precision_outputs_may_part_at_ties_as_often_as_batch_sizes_do(partings, exact, own, verdict):
    assert judge(partings, compared=32, exact=exact, between_batch_sizes=own).verdict == verdict


def test_the_verdict_says_where_and_by_how_much():
    partings = [parting(), parting(other=4, likely={7: -0.50, 4: -0.60}), parting(other=4)]
    said = judge(partings, compared=32, exact=False, between_batch_sizes=Share(3, 32)).said
    furthest = "2 of them without a tie, the furthest at token 5 of sample a (B1): tokens (7, 4), 2.500 nats apart"
    assert furthest in said
    said = judge([parting()] * 12, compared=32, exact=False, between_batch_sizes=Share(1, 32)).said
    assert "12 of 32" in said and "1 of 32" in said and "chance alone would show so many in 0.00058" in said


def test_a_drafter_that_parts_six_times_as_often_as_the_verifier_itself_is_not_taken_for_chance():
    judged = judge([parting()] * 20, compared=96, exact=False, between_batch_sizes=Share(1, 32))
    assert judged.verdict == "changed"
    assert "20 of 96" in judged.said and "(1 of 32)" in judged.said and "in 0.013 of such" in judged.said
