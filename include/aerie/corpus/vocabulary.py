"""Choosing the draft vocabulary from the corpus' response tokens, with speculators' own mapping function.

The most frequent tokens are taken. Tokens that the profile forces in (end of turn, think, tools) are taken however rare
they are: ``<think>`` occurs in prompts only, so by frequency alone it would fall out.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aerie.artefacts.draft_vocabulary import DraftVocabulary
from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.errors import BadInput, Failed
from aerie.settings.pipeline import VocabularySettings
from aerie.settings.profile import Profile

USUAL_SIZES = tuple(1 << power for power in range(6, 18))
SIZE_STEP = 64
"""Sizes that a coverage asks for are multiples of it, as GPUs multiply matrices best."""


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


@dataclass(frozen=True)
class CoverageCurve:
    """Share of response tokens that a draft vocabulary of any size holds.

    Tokens are in the order in which they are taken: those that are forced in, then by frequency. ``covered`` is int64
    [n], the occurrences of the first 1, 2, ... n tokens that occur or are forced; ``datasets`` the same by data set.
    """

    forced: int
    covered: npt.NDArray[np.int64]
    datasets: Mapping[str, npt.NDArray[np.int64]]

    @classmethod
    def of(cls, frequencies: Mapping[str, npt.NDArray[np.int64]], forced: Sequence[int]) -> Self:
        """The curve of these frequencies (data set to occurrences by token id, int64 [V])."""
        total = np.sum(list(frequencies.values()), axis=0)
        rank = -total
        rank[list(forced)] = -total.max() - 1
        taken = np.flatnonzero(rank)
        order = taken[np.argsort(rank[taken], kind="stable")]
        return cls(
            forced=len(set(forced)),
            covered=np.cumsum(total[order]),
            datasets={dataset: np.cumsum(by_token[order]) for dataset, by_token in frequencies.items()},
        )

    def at(self, size: int) -> Coverage:
        """What a draft vocabulary of ``size`` tokens covers."""
        last = min(size, len(self.covered)) - 1
        shares = {name: int(sums[last]) / int(sums[-1]) for name, sums in self.datasets.items() if sums[-1]}
        covered, total = int(self.covered[last]), int(self.covered[-1])
        return Coverage(covered / total, shares, covered_tokens=covered, response_tokens=total)

    def size_for(self, coverage: float, *, most: int) -> int:
        """The smallest size that covers this share, rounded up to a multiple of 64, and no more than ``most``."""
        wanted = math.ceil(coverage * int(self.covered[-1]))
        tokens = max(int(np.searchsorted(self.covered, wanted)) + 1, self.forced)
        return min(math.ceil(tokens / SIZE_STEP) * SIZE_STEP, most)

    def shares(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """What each of ``sizes`` covers, over the corpus and by data set."""
        at = [(size, self.at(size)) for size in sizes]
        return [{"size": size, "coverage": found.overall, "datasets": dict(found.datasets)} for size, found in at]


def usual_sizes(vocabulary_size: int) -> list[int]:
    """Sizes that are worth comparing: powers of two up to all of the verifier's tokens, which is the last."""
    return [*(size for size in USUAL_SIZES if size < vocabulary_size), vocabulary_size]


def size_asked_for(settings: VocabularySettings, curve: CoverageCurve, vocabulary_size: int) -> int:
    """The size that the settings name, or the one that their coverage asks for."""
    most = settings.size if settings.size is not None else vocabulary_size
    return most if settings.coverage is None else curve.size_for(settings.coverage, most=most)


def as_arrays(counts: Mapping[str, Mapping[int, int]], vocabulary_size: int) -> dict[str, npt.NDArray[np.int64]]:
    """Counts by token id as int64 [V], by data set."""
    arrays = {}
    for dataset, by_token in counts.items():
        arrays[dataset] = np.zeros(vocabulary_size, np.int64)
        arrays[dataset][list(by_token)] = list(by_token.values())
    return arrays


def total_frequencies(counts: Mapping[str, Mapping[int, int]]) -> dict[int, int]:
    """Counts by token id over all data sets."""
    total: Counter[int] = Counter()
    for by_token in counts.values():
        total.update(by_token)
    return dict(total)


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
        " (the log has what other sizes cover)"
    )
