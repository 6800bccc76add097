"""Mixture-of-Thoughts: ``messages`` whose assistant turns hold another model's reasoning."""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from aerie.sources.chat import messages_of
from aerie.sources.conversation import Conversation, list_field, well_formed


def read(row: Mapping[str, Any]) -> Conversation:
    """Read what comes before the first assistant turn: everything after it rests on the other model's reasoning.

    Raises:
        Unusable: a field is missing, a role is unknown, or nothing is left.
    """
    asked = takewhile(lambda message: message["role"] != "assistant", messages_of(list_field(row, "messages")))
    kept, notes = well_formed(list(asked))
    return Conversation(None, None, kept, notes=notes)
