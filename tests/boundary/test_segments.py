from aerie.boundary import judge_mask

from .families import Family


def row(f: Family, shift_start: int = 0, shift_stop: int = 0) -> tuple[list[int], list[int]]:
    """Two turns, each trained; the mask of the second may start and stop elsewhere."""
    first = [301, 302, f.close, 303, f.end]
    second = [304, 305, f.close, *f.section(f.call()), f.end]
    ids = [*f.prompt, *first, *f.prompt, *second, 306]
    mask = [0] * len(ids)
    mask[len(f.prompt) : len(f.prompt) + len(first)] = [1] * len(first)
    start, stop = 2 * len(f.prompt) + len(first) + shift_start, len(ids) - 1 + shift_stop
    mask[start:stop] = [1] * (stop - start)
    return ids, mask


def test_every_trained_segment_is_judged(f: Family) -> None:
    ids, mask = row(f)
    verdict = judge_mask(ids, mask, f.grammar)
    assert verdict.kept
    assert (verdict.reasoning_tokens, verdict.answer_tokens, verdict.tool_calls) == (4, 1, 1)
    assert [ids[c.arguments_start : c.arguments_stop] for c in verdict.calls] == [[310, 311]]
    assert [i for span in verdict.spans for i in range(span.start, span.stop)] == list(range(len(ids)))


def test_fault_in_the_second_segment_is_found_at_its_place(f: Family) -> None:
    ids, mask = row(f)
    fault = len(ids) - 4
    ids[fault] = f.foreign
    verdict = judge_mask(ids, mask, f.grammar)
    assert verdict.positions["foreign_special_token"] == (fault,)


def test_mask_one_off_at_either_end_is_corrupt(f: Family) -> None:
    for shift_start, shift_stop, reason in (
        (-1, 0, "prompt_not_open"),
        (1, 0, "prompt_not_open"),
        (0, -1, "missing_end"),
        (0, 1, "tokens_after_end"),
    ):
        verdict = judge_mask(*row(f, shift_start, shift_stop), f.grammar)
        assert verdict.reasons == (reason,)


def test_mask_that_trains_nothing_or_does_not_fit_is_corrupt(f: Family) -> None:
    ids, mask = row(f)
    assert judge_mask(ids, [0] * len(ids), f.grammar).reasons == ("mask_empty",)
    assert judge_mask(ids, mask[:-1], f.grammar).reasons == ("mask_mismatch",)
    assert judge_mask(ids, [2, *mask[1:]], f.grammar).reasons == ("mask_mismatch",)
