"""OpenThoughts-114k and OpenThoughts3: ``conversations``, in the first with a ``system`` that forces a format."""

from collections.abc import Mapping
from typing import Any

from aerie.sources.chat import shared_messages
from aerie.sources.conversation import Conversation, list_field, well_formed


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one row without its system prompt, which asks for ``<|begin_of_thought|>`` marks and the like.

    Raises:
        Unusable: a field is missing, a role is unknown, or nothing is left.
    """
    spoken = shared_messages(list_field(row, "conversations"))
    kept, notes = well_formed([message for message in spoken if message["role"] != "system"])
    return Conversation(None, None, kept, notes=notes)
