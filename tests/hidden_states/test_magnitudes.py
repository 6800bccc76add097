"""The band of magnitudes: of a row's own data set, unless that is too small to have a median."""

from aerie.hidden_states.magnitudes import MAGNITUDE_BAND, Magnitude, far_from_others


def rows(dataset, count, value, first=0):
    return [Magnitude(first + number, dataset, (1.0, value)) for number in range(count)]


def test_a_row_is_held_against_its_own_data_set_whose_magnitudes_may_be_unlike_another_s():
    other = rows("B2", 10, 50.0, first=10)
    assert far_from_others([*rows("B1", 10, 1.0), *other]) == {}
    found = far_from_others([*rows("B1", 10, 1.0), *other, Magnitude(99, "B1", (1.0, MAGNITUDE_BAND * 1.01))])
    assert list(found) == [99]
    assert "medians [1. 1.] of data set B1" in found[99]


def test_a_data_set_of_few_rows_is_held_against_the_corpus():
    found = far_from_others([*rows("B1", 10, 1.0), *rows("B2", 2, 0.05, first=10)])
    assert list(found) == [10, 11]
    assert "of the corpus" in found[10]


def test_nothing_is_far_where_there_is_nothing():
    assert far_from_others([]) == {}
