"""The readers by the name that a data set's ``source.reader`` gives."""

from collections.abc import Callable, Mapping
from typing import Any

from aerie.errors import BadInput
from aerie.settings.pipeline import GENERIC, SourceSettings
from aerie.sources import (
    glaive,
    magicoder,
    mixture_of_thoughts,
    opencodeinstruct,
    openthoughts,
    sharegpt,
    swe_agent,
    swe_smith,
    ultrachat,
)
from aerie.sources.conversation import Conversation
from aerie.sources.generic import GenericReader

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
    "swe_smith": swe_smith.read,
    "ultrachat": ultrachat.read,
}


def reader_of(source: SourceSettings) -> Reader:
    """The reader that a source's settings name.

    Raises:
        BadInput: no such reader; ``tokenised`` is for stage ``import``.
    """
    if source.reader == GENERIC:
        return GenericReader(source.columns)
    if source.reader not in READERS:
        raise BadInput(
            f"no reader {source.reader!r} for conversations: expected one of {', '.join((*READERS, GENERIC))} "
            f"({TOKENISED!r} is for data sets of kind 'tokenised', stage import)"
        )
    return READERS[source.reader]
