from datetime import UTC, datetime, timedelta

import pytest

from aerie.deadline import past_deadline

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
DEADLINE = NOW + timedelta(hours=2)
HOUR = 3600.0


def figures(low, high):
    return {"dataset": "B3_magicoder", "eta_low_seconds": low, "eta_high_seconds": high}


@pytest.mark.parametrize(("low", "high"), [(None, None), (HOUR, 9 * HOUR), (2 * HOUR, 3 * HOUR)])
def test_an_end_that_may_still_be_in_time_or_is_not_known_raises_no_alarm(low, high):
    assert past_deadline(figures(low, high), now=NOW, deadline=DEADLINE) is None
    assert past_deadline({"message": "a line without figures"}, now=NOW, deadline=DEADLINE) is None


def test_an_end_past_the_deadline_is_told_with_both_figures():
    assert past_deadline(figures(3 * HOUR, 4.5 * HOUR), now=NOW, deadline=DEADLINE) == (
        "B3_magicoder is expected to end between 2026-11-30 15:00 UTC and 2026-11-30 16:30 UTC, "
        "past the run's deadline at 2026-11-30 14:00 UTC (alerts.deadline_hours)"
    )


def test_an_end_that_is_nowhere_in_sight_is_past_the_deadline_too():
    assert "to end 2026-11-30 15:00 UTC or later, past" in past_deadline(
        figures(3 * HOUR, None), now=NOW, deadline=DEADLINE
    )
