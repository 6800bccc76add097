"""Which of equal rows stays, and what is told of the others."""

import numpy as np

from aerie.corpus.rows import TRAIN
from aerie.corpus.selection import DUPLICATE, KEPT, RowNumbers, Selection


def row(key: int, *, dataset: int, prompt: int, content: int) -> RowNumbers:
    return RowNumbers(
        keys=np.array([key], np.uint64),
        prompts=np.array([[prompt, 0]], np.uint64),
        contents=np.array([[content, 0]], np.uint64),
        prompts_of_generated=np.zeros(1, bool),
        splits=np.full(1, TRAIN, np.int8),
        datasets=np.array([dataset], np.int16),
        tokens=np.ones(1, np.int32),
        response_tokens=np.ones(1, np.int32),
        reasoning_tokens=np.zeros(1, np.int32),
    )


def test_a_copy_of_a_row_that_is_dropped_for_another_is_told_to_be_the_same_as_the_one_that_stays():
    stays = row(3, dataset=0, prompt=30, content=100)
    same_content = row(1, dataset=1, prompt=10, content=100)
    same_prompt = row(2, dataset=2, prompt=10, content=200)
    selection = Selection.of(RowNumbers.joined([same_content, same_prompt, stays]), maximum_length=8)
    selection.drop_copies(np.empty((0, 2), np.uint64))
    assert selection.reasons.tolist() == [DUPLICATE, DUPLICATE, KEPT]
    assert selection.same_as.tolist() == [3, 3, 0]
