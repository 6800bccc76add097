"""The readers by the name that a data set's ``source.reader`` gives."""

from collections.abc import Callable, Mapping
from typing import Any

from aerie.errors import BadInput
from aerie.sources import (
    glaive,
    magicoder,
    mixture_of_thoughts,
    opencodeinstruct,
    openthoughts,
    sharegpt,
    swe_agent,
    ultrachat,
)
from aerie.sources.conversation import Conversation

TOKENISED = "tokenised"

Reader = Callable[[Mapping[str, Any]], Conversation]

READERS: Mapping[str, Reader] = {
    "glaive": glaive.read,
    "magicoder": magicoder.read,
    "mixture_of_thoughts": mixture_of_thoughts.read,
    "opencodeinstruct": opencodeinstruct.read,
    "openthoughts": openthoughts.read,
    "sharegpt": sharegpt.read,
    "swe_agent": swe_agent.read,
    "ultrachat": ultrachat.read,
}


def reader_named(name: str) -> Reader:
    """The reader called ``name``.

    Raises:
        BadInput: no such reader; ``tokenised`` is for stage ``import``.
    """
    if name not in READERS:
        raise BadInput(
            f"no reader {name!r} for conversations: expected one of {', '.join(READERS)} "
            f"({TOKENISED!r} is for data sets of kind 'tokenised', stage import)"
        )
    return READERS[name]
