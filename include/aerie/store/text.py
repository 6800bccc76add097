"""Text that PostgreSQL can hold: it takes neither a null character nor half of a surrogate pair, in text or in JSON."""

import re
from typing import Any

from psycopg2.extras import Json

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
NULL_SHOWN, SURROGATE_SHOWN = "␀", "�"


def storable(value: Any) -> Any:
    """``value`` with each null character in its texts as ``␀``, each lone surrogate as ``�``: visible, and one for one.

    It looks into lists, tuples, mappings and ``Json``; everything else is left as it is.
    """
    if isinstance(value, str):
        return _UNSTORABLE.sub(_shown, value)
    if isinstance(value, dict):
        return {storable(name): storable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(storable, value))
    if isinstance(value, Json):
        return Json(storable(value.adapted))
    return value


def _shown(found: re.Match[str]) -> str:
    return NULL_SHOWN if found[0] == "\0" else SURROGATE_SHOWN
