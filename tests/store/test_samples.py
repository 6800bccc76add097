"""Pages of samples and lengths of responses, against a real PostgreSQL."""

import pytest

from aerie.store.connection import connected
from aerie.store.queries import ledger, previews, samples
from aerie.store.queries.samples import SampleFilter

KEY = {"edition": "main", "dataset": "B1_glaive"}
ROWS = [
    ledger.LedgerRow(
        f"s-{number:02d}",
        "quarantined" if number % 5 == 0 else "kept",
        reasons=("loop",) if number % 5 == 0 else (),
        flags=("truncated_in_answer",) if number % 2 else (),
        completion_tokens=10 * number,
        reasoning_tokens=2 * number,
    )
    for number in range(1, 21)
]


@pytest.fixture
def connection(database_url):
    with connected(database_url) as opened:
        ledger.write_rows(opened, **KEY, rows=[*ROWS, ledger.LedgerRow("s-99", "pending")])
        ledger.write_rows(opened, edition="main", dataset="B2", rows=[ledger.LedgerRow("s-01", "kept")])
        document = {"spans": [["prompt", "hello"], ["boundary", "<think>"], ["reasoning", "I think"]]}
        loaded = [{"sample_id": name, **document} for name in ("s-03", "s-10")]
        previews.load_previews(opened, **KEY, source="validate", previews=loaded)
        yield opened


def page(connection, **wanted):
    ends = {name: wanted.pop(name) for name in ("after", "before") if name in wanted}
    return samples.page_of_samples(connection, **KEY, wanted=SampleFilter(**wanted), rows=8, **ends)


def ids(found):
    return [row["sample_id"] for row in found.rows]


def test_pages_go_forth_and_back_over_every_sample_once(connection):
    everything = [*sorted(row.sample_id for row in ROWS), "s-99"]
    first = page(connection)
    second = page(connection, after=ids(first)[-1])
    third = page(connection, after=ids(second)[-1])
    assert ids(first) + ids(second) + ids(third) == everything
    assert [(one.before, one.after) for one in (first, second, third)] == [(False, True), (True, True), (True, False)]
    back = page(connection, before=ids(third)[0])
    assert ids(back) == ids(second) and (back.before, back.after) == (True, True)
    assert ids(page(connection, before=ids(second)[0])) == ids(first)
    assert not page(connection, before=ids(second)[0]).before
    assert ids(page(connection, after="s-99")) == [] and ids(page(connection, before="s-01")) == []


def test_samples_are_narrowed_by_state_by_finding_by_the_beginning_of_the_id_and_to_decoded_ones(connection):
    assert ids(page(connection, state="quarantined")) == ["s-05", "s-10", "s-15", "s-20"]
    assert ids(page(connection, finding="loop")) == ["s-05", "s-10", "s-15", "s-20"]
    assert ids(page(connection, state="quarantined", finding="truncated_in_answer")) == ["s-05", "s-15"]
    assert ids(page(connection, prefix="s-1")) == [f"s-{number}" for number in range(10, 18)]
    assert ids(page(connection, prefix="s-07")) == ["s-07"]
    for nothing in ("-1", "%", "s_", "s-0\\"):
        assert ids(page(connection, prefix=nothing)) == []
    assert ids(page(connection, decoded=True)) == ["s-03", "s-10"]
    assert ids(page(connection, finding="nothing")) == []


def test_a_row_says_whether_it_is_decoded_and_how_its_response_begins(connection):
    shown = {row["sample_id"]: (row["decoded"], row["excerpt"]) for row in page(connection).rows}
    assert shown["s-03"] == (True, "I think") and shown["s-04"] == (False, None)


def test_a_sample_comes_with_its_preview_and_an_unknown_one_is_none(connection):
    found = samples.read_sample(connection, **KEY, sample_id="s-03")
    assert found["preview"]["spans"][2] == ["reasoning", "I think"] and found["source"] == "validate"
    assert samples.read_sample(connection, **KEY, sample_id="s-04")["preview"] is None
    assert samples.read_sample(connection, **KEY, sample_id="s-98") is None


def test_lengths_are_those_of_judged_responses_and_answers_are_what_is_not_reasoning(connection):
    figures = samples.measure_lengths(connection, **KEY, length="reasoning")
    assert figures == samples.LengthFigures(responses=20, median=20, ninetieth=36, ninety_ninth=40, longest=40)
    answers = samples.measure_lengths(connection, **KEY, length="answer")
    assert (answers.median, answers.longest) == (80, 160)
    bars = samples.count_lengths(connection, **KEY, length="reasoning", width=10, bars=3)
    # 2 to 8 tokens, 10 to 18, 20 to 28, 30 and more; every fifth is quarantined
    assert bars == {"kept": [4, 4, 4, 4], "quarantined": [0, 1, 1, 2]}


def test_a_data_set_without_responses_has_no_lengths(connection):
    empty = {"edition": "main", "dataset": "B9"}
    figures = samples.measure_lengths(connection, **empty, length="answer")
    assert figures == samples.LengthFigures(0, None, None, None, None)
    assert samples.count_lengths(connection, **empty, length="answer", width=1, bars=1)["kept"] == [0, 0]
