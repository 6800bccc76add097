"""How long responses are, as a histogram whose bars have round widths."""

from collections.abc import Mapping
from math import floor, log10

from aerie.store.queries.ledger import State
from aerie.store.queries.samples import LengthFigures
from aerie_dashboard.charts import Chart, Series

BARS = 24
STEPS = (1, 2, 5, 10)


def width_of_bars(figures: LengthFigures) -> int:
    """Tokens that one bar spans: ``BARS`` of them reach the 99th percentile, so that few long ones flatten nothing."""
    reach = (figures.ninety_ninth or 0) + 1
    if reach <= BARS:
        return 1
    magnitude: int = 10 ** floor(log10(reach / BARS))
    return next(step * magnitude for step in STEPS if step * magnitude * BARS >= reach)


def length_chart(title: str, counts: Mapping[State, list[int]], *, width: int, longest: int) -> Chart:
    """Kept and quarantined responses by length; the last bar has everything longer than the others."""
    bars = min(len(counts["kept"]) - 1, longest // width + 1)
    first = next((at for at in range(bars) if any(counts[state][at] for state in counts)), 0)
    labels = [f"{at * width:,}–{(at + 1) * width - 1:,}" if width > 1 else f"{at:,}" for at in range(first, bars)]  # noqa: RUF001
    values = {state: found[first:bars] for state, found in counts.items()}
    if longest >= bars * width:
        labels.append(f"{bars * width:,} and more")
        values = {state: [*found, counts[state][bars]] for state, found in values.items()}
    return Chart(
        kind="stacked",
        title=title,
        labels=tuple(labels),
        series=(
            Series(name="kept", values=tuple(values["kept"]), colour="teal"),
            Series(name="quarantined", values=tuple(values["quarantined"]), colour="red"),
        ),
        x_title="tokens",
        y_title="responses",
    )
