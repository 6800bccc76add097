"""Magnitudes of captured states: a row far from its data set's has a broken file, or states of another model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

MAGNITUDE_BAND = 10.0
"""A row is refused whose root mean square in some slot is this many times above or below its data set's median."""

OWN_MEDIAN_ROWS = 8
"""A data set of fewer rows is held against the whole corpus: its own median could be that of the broken row."""


@dataclass(frozen=True)
class Magnitude:
    """A corpus row, its data set, and by slot [L] the root mean square of its states (``check.CheckedState``)."""

    row: int
    dataset: str
    rms: tuple[float, ...]


def far_from_others(magnitudes: Iterable[Magnitude]) -> Mapping[int, str]:
    """Rows that are out of the band, and what is wrong with each."""
    rows = list(magnitudes)
    if not rows:
        return {}
    values = np.array([one.rms for one in rows])
    datasets = np.array([one.dataset for one in rows])
    everything = np.median(values, axis=0)
    found: dict[int, str] = {}
    for dataset in np.unique(datasets):
        members = np.flatnonzero(datasets == dataset)
        own = len(members) >= OWN_MEDIAN_ROWS
        median = np.median(values[members], axis=0) if own else everything
        outside = (values[members] > median * MAGNITUDE_BAND) | (values[members] < median / MAGNITUDE_BAND)
        for member in members[outside.any(axis=1)]:
            found[rows[member].row] = (
                f"magnitudes {np.array2string(values[member], precision=3)} are far from the medians "
                f"{np.array2string(median, precision=3)} of {f'data set {dataset}' if own else 'the corpus'}"
            )
    return found
