from typing import Any

import pytest

from aerie.sources.conversation import Unusable
from aerie.sources.tokenised import read


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "length_mismatch"),
        ({"input_ids": [1, 10], "loss_mask": [0, 1]}, "id_outside_vocabulary"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "id_outside_vocabulary"),
        ({"input_ids": [1, 2**70], "loss_mask": [0, 1]}, "id_outside_vocabulary"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "mask_not_binary"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "mask_all_zero"),
        ({"input_ids": [1.0, 2.0], "loss_mask": [0, 1]}, "not_integers"),
        ({"input_ids": [1, 2], "loss_mask": [False, True]}, "not_integers"),
        ({"input_ids": [1, None], "loss_mask": [0, 1]}, "not_integers"),
        ({"input_ids": [], "loss_mask": []}, "empty_row"),
        ({"input_ids": [1, 2]}, "missing_field"),
        ({"input_ids": "1 2", "loss_mask": [0, 1]}, "missing_field"),
    ],
)
def test_a_row_that_would_train_on_something_else_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as refused:
        read(row, vocabulary_size=10)

    assert refused.value.reason == reason


def test_a_good_row_keeps_its_ids_and_masks_of_several_segments() -> None:
    row = read({"input_ids": [9, 0, 3, 4], "loss_mask": [0, 1, 0, 1], "id": 7}, vocabulary_size=10)

    assert (row.input_ids, row.loss_mask, row.source_id, row.conversation_id) == ([9, 0, 3, 4], [0, 1, 0, 1], "7", None)
