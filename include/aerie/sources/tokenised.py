"""Rows that arrive already tokenised (the A-series): ``input_ids``, ``loss_mask``, and perhaps an id."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aerie.sources.conversation import Unusable, own_id


@dataclass(frozen=True)
class TokenisedRow:
    """``input_ids`` and ``loss_mask`` have equal length; ids lie in the vocabulary, the mask holds 0 and 1."""

    source_id: str | None
    conversation_id: str | None
    input_ids: list[int]
    loss_mask: list[int]


def read(row: Mapping[str, Any], *, vocabulary_size: int) -> TokenisedRow:
    """Read and check one row; a row without ``conversation_id`` is a conversation of its own.

    Raises:
        Unusable: a list is missing or is not of integers, the lengths differ, an id lies outside of the vocabulary,
            or the mask holds something else than 0 and 1, or no 1.
    """
    input_ids, loss_mask = _integers(row, "input_ids"), _integers(row, "loss_mask")
    if len(input_ids) != len(loss_mask):
        raise Unusable("length_mismatch", f"{len(input_ids)} input_ids, but {len(loss_mask)} in loss_mask")
    if input_ids.min() < 0 or input_ids.max() >= vocabulary_size:
        outside = input_ids[(input_ids < 0) | (input_ids >= vocabulary_size)][0]
        raise Unusable("id_outside_vocabulary", f"expected ids from 0 to {vocabulary_size - 1}, found {outside}")
    if not np.isin(loss_mask, (0, 1)).all():
        raise Unusable("mask_not_binary", f"expected 0 and 1, found {loss_mask[~np.isin(loss_mask, (0, 1))][0]}")
    if not loss_mask.any():
        raise Unusable("mask_all_zero", f"none of {len(loss_mask)} tokens would be trained on")
    return TokenisedRow(own_id(row, "id"), own_id(row, "conversation_id"), input_ids.tolist(), loss_mask.tolist())


def _integers(row: Mapping[str, Any], name: str) -> npt.NDArray[np.int64]:
    value = row.get(name)
    if not isinstance(value, list):
        raise Unusable("missing_field", f"expected a list of integers in {name!r}, found {type(value).__name__}")
    if not value:
        raise Unusable("empty_row", f"{name!r} is an empty list")
    if not all(type(item) is int for item in value):
        wrong = next(item for item in value if type(item) is not int)
        raise Unusable("not_integers", f"expected integers in {name!r}, found {wrong!r} ({type(wrong).__name__})")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise Unusable("id_outside_vocabulary", f"a value in {name!r} does not fit 64 bits") from None
