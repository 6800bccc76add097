"""Choosing the draft vocabulary from the corpus' response tokens, with speculators' own mapping function.

The most frequent tokens are taken. Tokens that the profile forces in (end of turn, think, tools) are taken however rare
they are: ``<think>`` occurs in prompts only, so by frequency alone it would fall out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.artefacts.draft_vocabulary import DraftVocabulary
from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.errors import BadInput, Failed
from aerie.settings.profile import Profile


@dataclass(frozen=True)
class Coverage:
    """Share of response tokens that the draft vocabulary holds, over the corpus and by data set."""

    overall: float
    datasets: Mapping[str, float]
    covered_tokens: int
    response_tokens: int


def forced_tokens(profile: Profile, verifier: VerifierTokens) -> dict[str, int]:
    """Tokens that are in the draft vocabulary however rare, with their ids.

    Raises:
        BadInput: the verifier has no such token.
    """
    names = dict.fromkeys((*profile.forced_vocabulary, *profile.end_of_turn))
    missing = [name for name in names if name not in verifier.token_ids]
    if missing:
        raise BadInput(
            f"profile {profile.name} forces {', '.join(missing)} into the draft vocabulary, but the verifier's "
            "tokenizer has no such token; correct forced_vocabulary"
        )
    return {name: verifier.token_ids[name] for name in names}


def choose(
    counts: Mapping[str, Mapping[int, int]],
    *,
    size: int,
    forced: Sequence[int],
    vocabulary_size: int,
    corpus_fingerprint: str,
) -> DraftVocabulary:
    """Choose ``size`` tokens.

    Args:
        counts: data set to token id to count of response tokens.
        size: tokens of the draft vocabulary; where fewer occur, speculators fills up with the lowest ids.
        forced: ids that are taken whatever their count.
        vocabulary_size: tokens of the verifier.
        corpus_fingerprint: what the mapping is bound to.

    Raises:
        BadInput: ``size`` is more than the verifier has, or less than the forced tokens need.
    """
    # Costs seconds, and merge does not need it.
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    if size > vocabulary_size:
        raise BadInput(f"vocabulary.size is {size}, but the verifier has {vocabulary_size} tokens; ask for no more")
    if size < len(set(forced)):
        raise BadInput(f"vocabulary.size is {size}, but {len(set(forced))} tokens are forced in; ask for more")
    frequencies = total_frequencies(counts)
    first = max(frequencies.values(), default=0) + 1
    d2t, t2d = build_vocab_mappings_from_distribution(
        {**frequencies, **dict.fromkeys(forced, first)}, draft_vocab_size=size, target_vocab_size=vocabulary_size
    )
    return DraftVocabulary(d2t=d2t.numpy(), t2d=t2d.numpy(), corpus_fingerprint=corpus_fingerprint)


def total_frequencies(counts: Mapping[str, Mapping[int, int]]) -> dict[int, int]:
    """Counts by token id over all data sets."""
    total: Counter[int] = Counter()
    for by_token in counts.values():
        total.update(by_token)
    return dict(total)


def measure_coverage(vocabulary: DraftVocabulary, counts: Mapping[str, Mapping[int, int]]) -> Coverage:
    """Share of response tokens inside ``vocabulary``."""
    covered, total = {}, {}
    for dataset, by_token in counts.items():
        tokens = np.fromiter(by_token.keys(), np.int64, len(by_token))
        occurrences = np.fromiter(by_token.values(), np.int64, len(by_token))
        covered[dataset] = int(occurrences[vocabulary.t2d[tokens]].sum())
        total[dataset] = int(occurrences.sum())
    return Coverage(
        overall=sum(covered.values()) / sum(total.values()),
        datasets={dataset: covered[dataset] / total[dataset] for dataset in counts},
        covered_tokens=sum(covered.values()),
        response_tokens=sum(total.values()),
    )


def require_coverage(coverage: Coverage, *, minimum: float, size: int) -> None:
    """Refuse a draft vocabulary that leaves out too much.

    Raises:
        Failed: with the sum.
    """
    if coverage.overall >= minimum:
        return
    raise Failed(
        f"a draft vocabulary of {size} tokens covers {coverage.covered_tokens} of {coverage.response_tokens} response "
        f"tokens ({coverage.overall:.2%}), less than vocabulary.minimum_coverage {minimum:.2%}; raise vocabulary.size"
    )
