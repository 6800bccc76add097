import math

import pytest

from aerie.generation.rates import GrowthRate


def test_a_steady_rate_gives_one_time_and_an_uneven_one_a_span_around_it():
    steady, uneven = GrowthRate(0, 0.0), GrowthRate(0, 0.0)
    for look in range(1, 11):
        steady.look(100 * look, 10.0 * look)
        uneven.look(100 * look + (50 if look % 2 else 0), 10.0 * look)
    flat = steady.seconds_for(1000)
    assert (flat.low, flat.expected, flat.high) == pytest.approx((100.0, 100.0, 100.0))
    span = uneven.seconds_for(1000)
    assert span.low < span.expected < span.high


def test_no_rate_yet_means_that_the_time_is_not_known_rather_than_zero():
    assert GrowthRate(0, 0.0).seconds_for(10).expected == math.inf
    stalled = GrowthRate(5, 0.0)
    stalled.look(5, 10.0)
    assert stalled.seconds_for(10).low == math.inf


def test_nothing_left_takes_no_time_even_before_a_rate_is_known():
    assert GrowthRate(0, 0.0).seconds_for(0).high == 0.0


def test_a_rate_that_may_be_nothing_has_no_latest_time():
    rate = GrowthRate(0, 0.0)
    for look, value in enumerate((0, 0, 300), start=1):
        rate.look(value, 10.0 * look)
    span = rate.seconds_for(100)
    assert math.isfinite(span.low) and span.high == math.inf


def test_the_rate_is_of_the_latest_intervals_not_of_a_slow_start():
    rate = GrowthRate(0, 0.0)
    value = 0
    for look in range(1, 400):
        value += 1 if look < 200 else 100
        rate.look(value, float(look))
    assert rate.seconds_for(1000).expected == pytest.approx(10.0)
