"""ShareGPT as collected from shared pages: ``conversations``, with the repairs that such pages need."""

import re
from collections.abc import Mapping
from typing import Any

from aerie.sources.chat import shared_messages
from aerie.sources.conversation import Conversation, list_field, own_id, well_formed
from aerie.sources.html import text_of_page

_PART = re.compile(r"_\d+\Z")
_ABOUT_MARKUP = re.compile(r"\b(?:html5?|css|xml|svg|jsx?|javascript|php|markup|web ?pages?|websites?|tags?)\b", re.I)


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one row. Long conversations were split into parts ``<id>_0``, ``<id>_1``: they share ``<id>``.

    Raises:
        Unusable: a field is missing, a role is unknown, or nothing is left.
    """
    messages = shared_messages(list_field(row, "conversations"))
    notes = []
    # What people say about markup must keep its tags; elsewhere tags are left over from the shared page.
    if not any(message["role"] == "user" and _ABOUT_MARKUP.search(message["content"]) for message in messages):
        plain = [{**message, "content": text_of_page(message["content"])} for message in messages]
        if plain != messages:
            notes.append("converted:html")
        messages = plain
    kept, repairs = well_formed(messages)
    source_id = own_id(row, "id")
    return Conversation(source_id, source_id and _PART.sub("", source_id), kept, notes=(*notes, *repairs))
