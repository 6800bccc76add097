"""Caps, weights and budgets of data sets: a fair sample of each, the same one however the rows are read."""

import numpy as np
import pytest

from aerie.artefacts.corpus import iterate_rows
from aerie.corpus import merge as merging
from aerie.corpus.limits import Limit
from aerie.corpus.stage import merge
from aerie.errors import Failed
from aerie.settings.pipeline import CapSettings, PipelineSettings

from .conftest import Edition, sample

DATASETS = ("B1_glaive", "B2_opencodeinstruct")
ROWS, RESPONSE = 300, 4


@pytest.fixture
def edition(tmp_path) -> Edition:
    made = Edition(tmp_path)
    for number, dataset in enumerate(DATASETS):
        made.validated(
            dataset,
            [
                sample(f"{dataset}-{i}", [number, i % 40, 1 + i // 40], [5] * RESPONSE,
                       split="validation" if i % 4 == 0 else "train")
                for i in range(ROWS)
            ],
        )  # fmt: skip
    return made


def run(edition, datasets=DATASETS, force=False, **corpus):
    request = edition.request(datasets=datasets, force=force, corpus={"maximum_length": 32, **corpus})
    manifest = merge(request, edition.events).manifest
    return manifest.counts, list(iterate_rows(request.files.corpus / "dataset"))


def of(rows, dataset, split=None):
    return [row for row in rows if row.dataset == dataset and split in (None, row.split)]


def test_a_capped_data_set_gives_no_more_than_its_cap_and_the_rest_is_counted(edition):
    counts, rows = run(edition, caps={"B1_glaive": {"response_tokens": 401}, "B2_opencodeinstruct": {"rows": 7}})
    assert len(of(rows, "B1_glaive")) == 100
    assert len(of(rows, "B2_opencodeinstruct")) == 7
    assert counts["datasets"]["B1_glaive"]["response_tokens"] == 400
    assert counts["datasets"]["B1_glaive"]["dropped"]["over_cap"] == 200
    assert counts["dropped"]["over_cap"] == 200 + 293
    assert counts["response_tokens"] == sum(int(row.loss_mask.sum()) for row in rows)


def test_a_capped_data_set_is_spread_over_the_whole_shuffle_and_both_splits(edition):
    _, rows = run(edition, caps={"B1_glaive": {"rows": 100}})
    train = [row for row in rows if row.split == "train"]
    places = np.array([i for i, row in enumerate(train) if row.dataset == "B1_glaive"]) / len(train)
    assert 0.4 < places.mean() < 0.6
    assert places.max() > 0.9
    assert 10 < len(of(rows, "B1_glaive", "validation")) < 45


def test_the_sample_does_not_depend_on_partitions_or_the_order_of_data_sets_or_of_their_rows(edition, monkeypatch):
    caps = {"B1_glaive": {"rows": 50}}
    counts, rows = run(edition, caps=caps)
    chosen = [row.sample_id for row in rows]
    monkeypatch.setattr(merging, "TOKENS_PER_PARTITION", 100)
    samples = [
        sample(
            f"B1_glaive-{i}", [0, i % 40, 1 + i // 40], [5] * RESPONSE, split="validation" if i % 4 == 0 else "train"
        )
        for i in reversed(range(ROWS))
    ]
    edition.validated("B1_glaive", samples)
    again, others = run(edition, datasets=DATASETS[::-1], force=True, caps=caps)
    assert [row.sample_id for row in others] == chosen
    assert again["corpus_fingerprint"] == counts["corpus_fingerprint"]


def test_raising_a_cap_adds_rows_and_keeps_those_that_were_there(edition):
    few = {row.sample_id for row in run(edition, caps={"B1_glaive": {"rows": 20}})[1]}
    more = {row.sample_id for row in run(edition, caps={"B1_glaive": {"rows": 40}})[1]}
    assert few < more


def test_weights_set_the_proportion_of_response_tokens_and_repeat_nothing(edition):
    counts, rows = run(edition, weights={"B1_glaive": 1, "B2_opencodeinstruct": 3})
    assert len(of(rows, "B2_opencodeinstruct")) == ROWS
    assert counts["datasets"]["B1_glaive"]["response_tokens"] == ROWS * RESPONSE / 3
    assert counts["dropped"]["over_weight"] == 200
    counts, rows = run(edition, caps={"B2_opencodeinstruct": {"rows": 30}}, weights=dict.fromkeys(DATASETS, 1))
    assert (len(of(rows, "B1_glaive")), len(of(rows, "B2_opencodeinstruct"))) == (30, 30)


def test_a_data_set_with_a_weight_and_no_row_is_named_instead_of_emptying_the_corpus(edition):
    edition.validated("B2_opencodeinstruct", [])
    with pytest.raises(Failed, match=r"corpus.weights: no row is left of B2_opencodeinstruct"):
        run(edition, weights=dict.fromkeys(DATASETS, 1))


def test_long_answers_are_not_passed_over_where_a_cap_is_nearly_reached():
    assert Limit(response_tokens=10).rows_within(np.array([4, 4, 9, 1], np.int32)) == 2
    assert Limit(response_tokens=8, rows=1).rows_within(np.array([4, 4], np.int32)) == 1


def with_a1(edition, **dataset):
    document = edition.request().settings.model_dump(mode="json")
    source = {"reader": "tokenised", "path": "x", "licence": "mit"}
    document["datasets"]["A1"] = {"kind": "tokenised", "source": source, **dataset}
    return PipelineSettings.model_validate(document)


def test_a_budget_of_a_tokenised_data_set_is_kept_at_the_merge_and_none_is_set_by_default(edition):
    edition.validated("A1", [sample(f"A1-{i}", [3, i % 40, 1 + i // 40], [6] * RESPONSE) for i in range(80)])

    def rows_of_a1(**dataset):
        request = edition.request(force=True).model_copy(update={"settings": with_a1(edition, **dataset)})
        merge(request, edition.events)
        return len(of(list(iterate_rows(request.files.corpus / "dataset")), "A1"))

    assert rows_of_a1() == 80
    assert rows_of_a1(budget_tokens=100) == 25


@pytest.mark.parametrize("setting", [{"caps": {"B7_x": {"rows": 1}}}, {"weights": {"B7_x": 1}}])
def test_a_cap_or_weight_of_a_data_set_that_is_not_there_is_refused(edition, setting):
    with pytest.raises(ValueError, match="B7_x: no such data set"):
        edition.request(corpus={"maximum_length": 32, **setting})


def test_a_cap_that_caps_nothing_is_refused():
    with pytest.raises(ValueError, match="'response_tokens', 'rows' or both"):
        CapSettings()
