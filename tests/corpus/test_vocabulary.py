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
    settings = {"size": size, "minimum_coverage": minimum, "coverage": options.pop("coverage", None)}
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
    named = f"10-{manifest.counts['corpus_fingerprint'][:12]}.npy"
    assert {path.name for path in folder.iterdir()} == {f"d2t-{named}", f"t2d-{named}", "vocabulary.json"}


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
    assert len(list(folder.glob("*.npy"))) == 2


def test_a_mapping_file_that_another_corpus_left_is_refused(corpus):
    fingerprint = run(corpus, size=10).manifest.counts["corpus_fingerprint"]
    folder = corpus.request().files.vocabulary
    t2d = next(folder.glob("t2d-*.npy"))
    t2d.write_bytes(t2d.read_bytes()[:-1] + b"\x00")
    with pytest.raises(Failed, match="not the file that vocabulary wrote"):
        read_draft_vocabulary(folder, corpus_fingerprint=fingerprint)
    t2d.unlink()
    with pytest.raises(BadInput, match="run vocabulary again"):
        read_draft_vocabulary(folder, corpus_fingerprint=fingerprint)


def test_the_smallest_size_that_covers_the_target_is_taken(edition):
    wide = VERIFIER.model_copy(update={"vocabulary_size": 1000, "token_ids": dict.fromkeys(VERIFIER.token_ids, 999)})
    rows = [sample(f"s{i}", [1, i], [100 + i] * (200 - i)) for i in range(200)]
    edition.validated("B1_glaive", rows, wide)
    merge(edition.request(datasets=("B1_glaive",), corpus={"maximum_length": 500}), edition.events)

    def size_for(coverage, most=None):
        counts = run(edition, size=most, coverage=coverage, corpus={"maximum_length": 500}).manifest.counts
        return counts["size"], counts["coverage"]

    frequencies = [200 - i for i in range(200)]
    for target in (0.5, 0.9, 0.99):
        size, coverage = size_for(target)
        assert size % 64 == 0
        assert coverage >= target
        assert sum(frequencies[: max(0, size - 64 - 1)]) < target * sum(frequencies)
    assert size_for(1.0)[0] == 256
    size, coverage = size_for(0.99, most=70)
    assert (size, coverage < 0.99) == (70, True)


def test_no_more_tokens_are_asked_for_than_the_verifier_has_whatever_the_target(corpus):
    counts = run(corpus, size=None, coverage=1.0).manifest.counts
    assert (counts["size"], counts["coverage"]) == (VERIFIER.vocabulary_size, 1.0)


def test_coverage_of_several_sizes_is_recorded_by_data_set(edition):
    edition.validated("B1_glaive", [sample("a", [1], [10] * 9 + [11])])
    edition.validated("B2_opencodeinstruct", [sample("b", [1], [11] * 5 + [12] * 5)])
    merge(edition.request(), edition.events)
    counts = vocabulary(
        edition.request(vocabulary={"size": 9, "minimum_coverage": 0.1}), edition.events
    ).manifest.counts
    assert counts["coverage_by_dataset"] == {"B1_glaive": 0.9, "B2_opencodeinstruct": 0.0}
    assert counts["coverage_by_size"] == [
        {"size": 64, "coverage": 1.0, "datasets": {"B1_glaive": 1.0, "B2_opencodeinstruct": 1.0}}
    ]


def test_a_vocabulary_without_a_size_or_a_target_is_refused(edition):
    with pytest.raises(ValueError, match="expected 'size', or 'coverage'"):
        edition.request(vocabulary={"minimum_coverage": 0.5})


def test_a_target_below_the_least_that_is_accepted_is_refused_before_anything_runs(edition):
    with pytest.raises(ValueError, match=r"coverage 0.8 is below minimum_coverage 0.9"):
        edition.request(vocabulary={"coverage": 0.8})
