"""The errors that a person or a caller acts on, and the exit codes that carry them between processes.

A message names what is wrong, where (file, line, row id or setting), what was expected, and what to do.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def one_line(error: "ValidationError") -> str:
    """What a document has wrong, field by field, as one line for a person."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, "))))
        for one in error.errors(include_url=False)
    )


class AerieError(Exception):
    """Base of every error that Aerie raises on purpose."""

    exit_code = 1


class Failed(AerieError):
    """The work cannot succeed as it stands; trying again would fail the same way."""

    exit_code = 1


class BadInput(AerieError):
    """A setting, a file or a request is wrong and a person must change it."""

    exit_code = 2


class Retryable(AerieError):
    """The work may succeed when it is tried again (a server died, a connection broke)."""

    exit_code = 75


class Busy(Retryable):
    """Another run works on this data set now; the message says which, and since when. Waiting is what helps."""

    exit_code = 76
