"""How figures are written for people. ``None`` is a figure that nobody knows, and is written as such, never as zero."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

UNKNOWN = "–"  # noqa: RUF001 - a dash as typographers write it

MINUTE, HOUR, DAY = 60, 3600, 86400
THOUSAND = 1000
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
COUNT_UNITS = ("", "k", "M", "G", "T")


def number(value: float | None, digits: int = 2) -> str:
    """A number with thousands separators; ``digits`` after the point where it is not whole by type.

    One so small that it would be written as zero (a learning rate) has its own digits: ``3e-05``.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2g}" if value and round(value, digits) == 0 else f"{value:,.{digits}f}"


def compact(value: float | None) -> str:
    """A large count in three figures: ``1.23 M``. Below ten thousand it is written in full."""
    if value is None:
        return UNKNOWN
    if abs(value) < 10 * THOUSAND:
        return f"{value:,.0f}"
    return _scaled(value, COUNT_UNITS)


def tokens(value: float | None) -> str:
    """A count of tokens with its unit."""
    return UNKNOWN if value is None else f"{compact(value)} tokens"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return UNKNOWN if value is None else f"{value:,.0f} tok/s"


def size(value: float | None) -> str:
    """Bytes in decimal units: ``64.9 MB``."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f} B" if abs(value) < THOUSAND else _scaled(value, BYTE_UNITS)


def gib(value: float | None) -> str:
    """Memory in GiB, as a plan counts it."""
    return UNKNOWN if value is None else f"{value:,.2f} GiB"


def share(value: float | None, digits: int = 1) -> str:
    """A share as per cent."""
    return UNKNOWN if value is None else f"{value:.{digits}%}"


def duration(seconds: float | None) -> str:
    """A span of time in its two largest units: ``2 h 05 min``."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < MINUTE:
        return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02} s"
    if whole < DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE:02} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"


def time_left(low: float | None, high: float | None) -> str:
    """A range of seconds until something ends: ``12 min 00 s to 14 min 10 s``."""
    if low is None:
        return UNKNOWN
    if high is None:
        return f"more than {duration(low)}"
    first, last = duration(low), duration(high)
    return first if first == last else f"{first} to {last}"


def known(text: str) -> str:
    """A written figure that stands alone: what is not known is said in words."""
    return "not known" if text == UNKNOWN else text


def utc(moment: datetime | None) -> str:
    """A time of day in UTC, to the minute."""
    return UNKNOWN if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def clock(moment: datetime | None) -> str:
    """The time of a day in UTC, to the second."""
    return UNKNOWN if moment is None else f"{moment.astimezone(UTC):%H:%M:%S}"


def age(moment: datetime | None, now: datetime) -> str:
    """How long ago something was."""
    return UNKNOWN if moment is None else f"{duration((now - moment).total_seconds())} ago"


def seconds_of_epoch(seconds: float | None) -> datetime | None:
    """A time that a document has in seconds since 1970."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def words(name: str) -> str:
    """A name of the code as people read it: ``prompts_exhausted`` is ``prompts exhausted``."""
    return name.replace("_", " ")


def pretty(document: object) -> str:
    """A part of a stored document as indented JSON."""
    return json.dumps(document, indent=2, ensure_ascii=False)


def visible(text: str) -> str:
    """A text on one line, without characters that nobody sees or that turn others around."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def _scaled(value: float, units: tuple[str, ...]) -> str:
    step = 0
    # What rounds up to a thousand belongs to the next unit.
    while round(abs(value)) >= THOUSAND and step < len(units) - 1:
        value /= THOUSAND
        step += 1
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f} {units[step]}".rstrip()


FILTERS: Mapping[str, Callable[..., object]] = {
    "number": number,
    "compact": compact,
    "tokens": tokens,
    "rate": rate,
    "size": size,
    "gib": gib,
    "share": share,
    "known": known,
    "time_left": time_left,
    "duration": duration,
    "utc": utc,
    "clock": clock,
    "age": age,
    "words": words,
    "pretty": pretty,
    "visible": visible,
    "seconds_of_epoch": seconds_of_epoch,
}
"""Filters of the templates, by name."""
