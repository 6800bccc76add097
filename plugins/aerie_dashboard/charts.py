"""Charts as data: what is drawn, not how. ``static/charts.js`` draws them in the theme's colours.

Each chart is also written as a table, for those who cannot see it, and for copying.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import model_validator

from aerie.settings.profile import Frozen

Kind = Literal["line", "bar", "stacked", "sparkline"]
Colour = Literal["blue", "teal", "amber", "red", "violet", "grey"]


class Series(Frozen):
    """One line or one set of bars; a value of None is a gap. ``colour`` None takes the next one."""

    name: str
    values: tuple[float | None, ...]
    colour: Colour | None = None
    dashed: bool = False
    joined: bool = False
    """The line goes on across gaps."""


class Chart(Frozen):
    """A chart; ``title`` says what it shows, to a screen reader too.

    ``labels`` are the places on the x axis: where all are numbers, they are placed by their value. ``x_title`` and
    ``y_title`` name the axes with their units. A ``sparkline`` has no axes; ``horizontal`` lays bars down.
    """

    kind: Kind
    title: str
    labels: tuple[str, ...] | tuple[float, ...]
    series: tuple[Series, ...]
    x_title: str = ""
    y_title: str = ""
    horizontal: bool = False
    percent: bool = False
    """Values are shares, written as per cent."""
    logarithmic: bool = False

    @model_validator(mode="after")
    def _as_long_as_its_labels(self) -> Self:
        for one in self.series:
            if len(one.values) != len(self.labels):
                raise ValueError(f"series {one.name!r} has {len(one.values)} values for {len(self.labels)} labels")
        return self

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return all(value is None for one in self.series for value in one.values)


def sparkline(title: str, values: Sequence[float | None], labels: Sequence[str]) -> Chart:
    """A line the height of a word."""
    return Chart(
        kind="sparkline", title=title, labels=tuple(labels), series=(Series(name=title, values=tuple(values)),)
    )
