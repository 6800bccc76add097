"""``report.html`` beside the corpus: what it holds, as one file with its plots inside, for any browser.

Plots are SVG made by the template from numbers that are scaled here, so that the file needs no script and no network.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader, StrictUndefined

from aerie.corpus.tally import DatasetStatistics
from aerie.corpus.vocabulary import CoverageCurve, usual_sizes

BINS_PER_OCTAVE = 2
CURVE_POINTS = 80
LEAST_SHOWN_SIZE = 64
LEAST_TICK_DISTANCE = 0.05

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Bin:
    """A bar of a histogram: from ``low`` up to but not including ``high`` tokens; ``height`` is 1 for the tallest."""

    low: int
    high: int
    rows: int
    height: float


@dataclass(frozen=True)
class Budget:
    """Response tokens of a data set in the corpus, and its budget (None: it has none); shares of the longest bar."""

    dataset: str
    tokens: int
    budget: int | None
    tokens_share: float
    budget_share: float


@dataclass(frozen=True)
class Curve:
    """Coverage by size: points (x, y), both 0 to 1, x on a logarithmic scale."""

    name: str
    points: Sequence[tuple[float, float]]


def histograms(statistics: Mapping[str, DatasetStatistics]) -> dict[str, dict[str, list[Bin]]]:
    """Histograms of row and response lengths by data set, over the same half octaves for all of them."""
    longest = max((int(one.lengths.max(initial=1)) for one in statistics.values()), default=1)
    shortest = min((int(one.response_lengths.min(initial=longest)) for one in statistics.values()), default=1)
    first = math.floor(math.log2(max(shortest, 1)) * BINS_PER_OCTAVE)
    last = math.floor(math.log2(longest) * BINS_PER_OCTAVE) + 1
    # Rounded up, as lengths are whole numbers; below 3 two edges would be one.
    edges = sorted({math.ceil(2 ** (step / BINS_PER_OCTAVE)) for step in range(first, last + 1)} | {longest + 1})
    return {
        name: {"row": _bins(one.lengths, edges), "response": _bins(one.response_lengths, edges)}
        for name, one in statistics.items()
    }


def _bins(lengths: Int32Array, edges: Sequence[int]) -> list[Bin]:
    rows = np.histogram(lengths, edges)[0].tolist()
    tallest = max(*rows, 1)
    return [
        Bin(low, high, count, count / tallest) for low, high, count in zip(edges[:-1], edges[1:], rows, strict=True)
    ]


def budget_bars(tokens: Mapping[str, int], budgets: Mapping[str, int]) -> list[Budget]:
    """A bar for each data set; a budget of 0 is none."""
    longest = max((*tokens.values(), *(budgets.get(name, 0) for name in tokens), 1))
    return [
        Budget(name, there, budgets.get(name) or None, there / longest, budgets.get(name, 0) / longest)
        for name, there in tokens.items()
    ]


def coverage_curves(curve: CoverageCurve, vocabulary_size: int) -> list[Curve]:
    """The curve over the whole corpus, then those of its data sets, from 64 tokens to all of the verifier's."""
    least = min(LEAST_SHOWN_SIZE, vocabulary_size)
    sizes = sorted({round(size) for size in np.geomspace(least, vocabulary_size, CURVE_POINTS)})
    at = [(_place(size, vocabulary_size), curve.at(size)) for size in sizes]
    whole = Curve("all data sets", [(x, found.overall) for x, found in at])
    names = at[0][1].datasets
    return [whole, *(Curve(name, [(x, found.datasets[name]) for x, found in at]) for name in names)]


def _place(size: int, vocabulary_size: int) -> float:
    """Place of a size on the axis, 0 to 1."""
    least = min(LEAST_SHOWN_SIZE, vocabulary_size)
    return math.log(size / least) / (math.log(vocabulary_size / least) or 1.0)


def _ticks(sizes: Sequence[int], vocabulary_size: int) -> list[tuple[int, float]]:
    """Sizes to write below the axis, and their places: the last, and those that do not touch the next."""
    places = [_place(size, vocabulary_size) for size in sizes]
    roomy = [after - place > LEAST_TICK_DISTANCE for place, after in pairwise(places)]
    return [one for one, room in zip(zip(sizes, places, strict=True), [*roomy, True], strict=True) if room]


def render_report(
    *,
    edition: str,
    counts: Mapping[str, Any],
    statistics: Mapping[str, DatasetStatistics],
    frequencies: Mapping[str, npt.NDArray[np.int64]],
    budgets: Mapping[str, int],
) -> str:
    """The report as HTML; ``counts`` are the manifest's, ``budgets`` response tokens by data set."""
    vocabulary_size = len(next(iter(frequencies.values())))
    curve = CoverageCurve.of(frequencies, forced=())
    sizes = usual_sizes(vocabulary_size)
    tokens = {name: one["response_tokens"] for name, one in counts["datasets"].items()}
    environment = Environment(
        loader=PackageLoader("aerie.corpus", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        edition=edition,
        counts=counts,
        vocabulary_size=vocabulary_size,
        histograms=histograms(statistics),
        budgets=budget_bars(tokens, budgets),
        curves=coverage_curves(curve, vocabulary_size),
        sizes=curve.shares(sizes),
        ticks=_ticks(sizes, vocabulary_size),
    )
