"""The draft vocabulary: what speculators maps, with the tokens that a drafter cannot do without."""

import numpy as np
import pytest

from aerie.artefacts.draft_vocabulary import read_draft_vocabulary
from aerie.corpus.stage import merge, vocabulary
from aerie.errors import BadInput, Failed

from .conftest import VERIFIER, sample


def merged(edition, rows):
    edition.validated("B1_glaive", rows)
    merge(edition.request(datasets=("B1_glaive",)), edition.events)
    return edition


def run(edition, size, minimum=0.1, **options):
    settings = {"size": size, "minimum_coverage": minimum}
    return vocabulary(edition.request(datasets=("B1_glaive",), vocabulary=settings, **options), edition.events)


@pytest.fixture
def corpus(edition):
    return merged(edition, [sample(f"s{i}", [1, i], [10] * 8 + [11] * 3 + [12 + i % 5]) for i in range(20)])


def test_tokens_that_occur_in_prompts_only_are_forced_in_and_the_frequent_ones_follow(corpus):
    manifest = run(corpus, size=10).manifest
    folder = corpus.request().files.vocabulary
    read = read_draft_vocabulary(folder, corpus_fingerprint=manifest.counts["corpus_fingerprint"])
    tokens = set((np.arange(10) + read.d2t).tolist())
    assert tokens == {*VERIFIER.token_ids.values(), 10, 11}
    assert (read.d2t.dtype, read.t2d.dtype, len(read.t2d)) == (np.int64, np.bool_, VERIFIER.vocabulary_size)
    assert {path.name for path in folder.iterdir()} == {"d2t-10.npy", "t2d-10.npy", "vocabulary.json"}


def test_coverage_is_the_share_of_response_tokens_over_all_and_by_data_set(corpus):
    counts = run(corpus, size=10).manifest.counts
    assert counts["coverage"] == pytest.approx(11 / 12)
    assert counts["coverage_by_dataset"] == {"B1_glaive": pytest.approx(11 / 12)}


def test_coverage_below_the_minimum_fails_with_the_sum(corpus):
    with pytest.raises(Failed, match=r"10 tokens covers 220 of 240 response tokens \(91.67%\).*95.00%"):
        run(corpus, size=10, minimum=0.95)


def test_a_size_above_the_verifiers_vocabulary_or_below_the_forced_tokens_is_refused(corpus):
    with pytest.raises(BadInput, match="size is 65, but the verifier has 64"):
        run(corpus, size=65)
    with pytest.raises(BadInput, match="size is 7, but 8 tokens are forced in"):
        run(corpus, size=7)


def test_more_draft_tokens_than_ever_occurred_is_counted(corpus):
    assert run(corpus, size=40).manifest.counts["never_seen_tokens"] == 40 - 7


def test_a_mapping_of_an_earlier_corpus_is_refused_and_made_anew(corpus):
    first = run(corpus, size=10).manifest
    assert run(corpus, size=10).reused
    merged(corpus, [sample("other", [1], [20, 21])])
    folder, fresh = corpus.request().files.vocabulary, None
    fresh = run(corpus, size=10)
    assert not fresh.reused
    assert fresh.manifest.counts["corpus_fingerprint"] != first.counts["corpus_fingerprint"]
    with pytest.raises(Failed, match="stale draft vocabulary"):
        read_draft_vocabulary(folder, corpus_fingerprint=first.counts["corpus_fingerprint"])
