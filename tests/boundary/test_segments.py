import pytest

from aerie.boundary import judge_mask

from .families import ALL, Family, family


def turns(f: Family) -> tuple[list[int], list[int]]:
    """Two responses, the second with a tool call where the family has them."""
    first = f.said([301, 302], [303])
    has_tools = f.profile.tools or f.profile.channels
    return first, f.called([304, 305], f.call()) if has_tools else f.said([304, 305], [307])


def row(f: Family, shift_start: int = 0, shift_stop: int = 0) -> tuple[list[int], list[int]]:
    """Two turns, each trained; the mask of the second may start and stop elsewhere."""
    first, second = turns(f)
    ids = [*f.prompt, *first, *f.prompt, *second, 306]
    mask = [0] * len(ids)
    mask[len(f.prompt) : len(f.prompt) + len(first)] = [1] * len(first)
    start, stop = 2 * len(f.prompt) + len(first) + shift_start, len(ids) - 1 + shift_stop
    mask[start:stop] = [1] * (stop - start)
    return ids, mask


def test_every_trained_segment_is_judged(f: Family) -> None:
    ids, mask = row(f)
    verdict = judge_mask(ids, mask, f.grammar)
    has_tools = bool(f.profile.tools or f.profile.channels)
    assert (verdict.reasons, verdict.flags) == ((), ())
    assert (verdict.reasoning_tokens, verdict.answer_tokens) == (4 * f.thinks, 2 - has_tools)
    assert verdict.tool_calls == has_tools
    assert all({310, 311} <= set(ids[c.arguments_start : c.arguments_stop]) for c in verdict.calls)
    assert [i for span in verdict.spans for i in range(span.start, span.stop)] == list(range(len(ids)))


def test_fault_in_the_second_segment_is_found_at_its_place(f: Family) -> None:
    ids, mask = row(f)
    fault = len(ids) - 3
    ids[fault] = f.grammar.vocabulary_size
    verdict = judge_mask(ids, mask, f.grammar)
    assert verdict.positions["id_out_of_range"] == (fault,)


# DeepSeek-V3-0324's prompts end in whatever the last message ends in: nothing tells where the mask should start.
@pytest.mark.parametrize("f", [name for name in ALL if name != "deepseek_v3_0324"], indirect=True)
@pytest.mark.parametrize("shift", [-1, 1])
def test_mask_that_starts_one_off_is_corrupt(f: Family, shift: int) -> None:
    assert {"prompt_not_open", "no_open"} & set(judge_mask(*row(f, shift), f.grammar).reasons)


def test_mask_that_stops_one_off_is_corrupt(f: Family) -> None:
    assert "missing_end" in judge_mask(*row(f, 0, -1), f.grammar).reasons
    assert judge_mask(*row(f, 0, 1), f.grammar).reasons == ("tokens_after_end",)


def test_mask_that_starts_one_off_at_a_spelled_tag_is_corrupt() -> None:
    f = family("deepseek_v3_0324")
    for shift in (-1, 1):
        assert judge_mask(*row(f, shift), f.grammar).reasons == ("second_close",)


def test_mask_that_trains_nothing_or_does_not_fit_is_corrupt(f: Family) -> None:
    ids, mask = row(f)
    assert judge_mask(ids, [0] * len(ids), f.grammar).reasons == ("mask_empty",)
    assert judge_mask(ids, mask[:-1], f.grammar).reasons == ("mask_mismatch",)
    assert judge_mask(ids, [2, *mask[1:]], f.grammar).reasons == ("mask_mismatch",)
