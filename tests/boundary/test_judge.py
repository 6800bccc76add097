"""A hand-made case for every reason, for each shipped family with its real ids."""

from collections.abc import Callable

import pytest

from aerie.boundary import (
    CORRUPT,
    FLAGS,
    RULES,
    Verdict,
    apply_policy,
    check_drop_flags,
    compile_grammar,
    judge,
    response_mask,
)
from aerie.boundary.grammar import Kind
from aerie.boundary.rules import TEXT_RULES
from aerie.errors import BadInput
from aerie.settings.profile import load_profile

from .families import ALL, RECIPIENT, Family, family

REASONING = [301, 302, 303]
ANSWER = [304, 305]


def families(chosen: Callable[[Family], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("f", [name for name in ALL if chosen(family(name))], indirect=True)


def opened(f: Family) -> bool:
    return f.thinks and f.profile.reasoning.opens_in == "response"


def tags(f: Family) -> bool:
    return f.open >= 0 and f.thinks


def tools(f: Family) -> bool:
    return f.profile.tools is not None


def section(f: Family) -> bool:
    return f.section_begin >= 0


def pairs(f: Family) -> bool:
    return f.key_begin >= 0


def separated(f: Family) -> bool:
    return f.argument_begin >= 0


def channels(f: Family) -> bool:
    return f.profile.channels is not None


def thinks(f: Family) -> bool:
    return f.thinks


def anyone(f: Family) -> bool:
    return True


def ordinary_tail(f: Family) -> bool:
    kinds = f.grammar.kinds[f.prompt[-4:]]
    return not set(kinds.tolist()) & {Kind.FOREIGN, Kind.OPEN}


def said(verdict: Verdict) -> tuple[set[str], set[str]]:
    return set(verdict.reasons), set(verdict.flags)


def test_well_formed_answer_is_kept_and_counted(f: Family) -> None:
    verdict = f.judge(f.said(REASONING, ANSWER))
    assert (verdict.verdict, said(verdict)) == ("kept", (set(), set()))
    assert (verdict.reasoning_tokens, verdict.answer_tokens) == (3 * f.thinks, 2)
    assert (verdict.tool_calls, verdict.unchecked) == (0, ())


@families(lambda f: tools(f) or channels(f))
def test_well_formed_tool_calls_are_kept_located_and_wait_for_text(f: Family) -> None:
    calls = [f.call(0), f.call(1)][: 1 if f.profile.channels else 2]
    output = f.called(REASONING, *calls)
    verdict = f.judge(output)
    assert said(verdict) == (set(), set())
    assert verdict.tool_calls == len(calls)
    arguments = [output[c.arguments_start : c.arguments_stop] for c in verdict.calls]
    assert all({310, 311} <= set(found) for found in arguments)
    ids = [set(output[c.id_start : c.id_stop]) & {320, 321, RECIPIENT + 2} for c in verdict.calls]
    named = f.profile.channels or f.argument_begin >= 0 or f.profile.tools.pairs
    assert all(ids) == bool(named)
    assert "tool_arguments_not_json" in verdict.unchecked


def test_special_token_ids_of_kimi_are_the_published_ones() -> None:
    # 163606 opens and 163607 closes; the row below is written with bare numbers on purpose.
    kimi = family("kimi_k25").grammar
    prompt = [163587, 1, 163601, 2, 163586, 163588, 3, 163601, 163606]
    tools = [163595, 163597, 9, 163598, 8, 163599, 163596]
    assert judge(prompt, [5, 163607, 6, *tools, 163586], grammar=kimi, finish_reason="stop").kept
    assert judge(prompt, [5, 163606, 6, 163586], grammar=kimi, finish_reason="stop").reasons[:2] == (
        "no_close",
        "second_open",
    )


def test_a_message_of_gpt_oss_is_the_published_one() -> None:
    grammar = family("gpt_oss").grammar
    analysis = [200005, 35644, 200008, 976, 1825, 200007]
    final = [200006, 173781, 200005, 17196, 200008, 25, 200002]
    assert judge([200006, 173781], [*analysis, *final], grammar=grammar, finish_reason="stop").kept
    call = [200006, 173781, 200005, 12606, 815, 316, 28, 44580, 775, 170154, 220, 200003, 4108, 200008, 12083, 200012]
    verdict = judge([200006, 173781], [*analysis, *call], grammar=grammar, finish_reason="stop")
    assert (verdict.kept, verdict.tool_calls) == (True, 1)


def to_answer(f: Family) -> list[int]:
    """A response to where its answer begins."""
    return [*f.think(REASONING), *f.closing]


def in_tools(f: Family, *tokens: int) -> list[int]:
    """A response whose tool section is cut to ``tokens``."""
    return [*to_answer(f), *tokens, f.end]


CASES = {
    # name: (families, output, options, reasons, flags)
    "no_close": (thinks, lambda f: [*f.think(REASONING), f.end], {}, {"no_close", "empty_answer"}, set()),
    "no_open": (opened, lambda f: f.said(REASONING, ANSWER)[len(f.opening) :], {}, {"no_open"}, set()),
    "no_open_and_no_reasoning": (
        lambda f: opened(f) and tags(f), lambda f: [*ANSWER, f.end], {}, {"no_open"}, set(),
    ),
    "text_before_opening": (
        lambda f: opened(f) and tags(f), lambda f: [306, *f.said(REASONING, ANSWER)], {}, {"no_open"}, set()
    ),
    "opened_late_and_again": (
        lambda f: opened(f) and tags(f), lambda f: [306, *to_answer(f), f.open, *ANSWER, f.end],
        {}, {"no_open", "second_open"}, set(),
    ),
    "second_open": (
        tags, lambda f: [*f.think(REASONING), f.open, 304, *f.closing, *ANSWER, f.end], {}, {"second_open"}, set()
    ),
    "second_open_in_answer": (tags, lambda f: [*to_answer(f), f.open, *ANSWER, f.end], {}, {"second_open"}, set()),
    "second_analysis": (
        channels,
        lambda f: [*f.think(REASONING), *f.closing[:3], *f.opening, 306, *f.closing, *ANSWER, f.end],
        {}, {"second_open"}, set(),
    ),
    "second_close": (
        tags, lambda f: [*to_answer(f), *ANSWER, f.close, 306, f.end], {}, {"second_close"}, set()
    ),
    "second_message_end": (
        channels, lambda f: [*f.think(REASONING), f.message_end, *f.closing, *ANSWER, f.end],
        {}, {"second_close"}, set(),
    ),
    "empty_reasoning": (thinks, lambda f: f.said([], ANSWER), {}, {"empty_reasoning"}, set()),
    "white_reasoning": (thinks, lambda f: f.said([f.blank, f.blank], ANSWER), {}, {"empty_reasoning"}, set()),
    "empty_answer": (anyone, lambda f: f.said(REASONING, []), {}, {"empty_answer"}, set()),
    "white_answer": (anyone, lambda f: f.said(REASONING, [f.blank]), {}, {"empty_answer"}, set()),
    "stripped_end": (
        anyone, lambda f: [*to_answer(f), *ANSWER], {}, {"missing_end", "stop_without_end"}, set()
    ),
    "missing_end": (anyone, lambda f: [*to_answer(f), *ANSWER], {"finish_reason": None}, {"missing_end"}, set()),
    "tokens_after_end": (anyone, lambda f: [*f.said(REASONING, ANSWER), 306], {}, {"tokens_after_end"}, set()),
    "end_twice": (anyone, lambda f: [*f.said(REASONING, ANSWER), f.end], {}, {"tokens_after_end"}, set()),
    "end_without_stop": (
        anyone, lambda f: f.said(REASONING, ANSWER), {"finish_reason": "length"}, {"end_without_stop"}, set()
    ),
    "ended_at_cap": (
        anyone, lambda f: f.said(REASONING, ANSWER),
        {"finish_reason": {"type": "length", "length": 3}, "max_new_tokens": 3}, set(), {"ended_at_cap"},
    ),
    "ended_at_unknown_cap": (
        anyone, lambda f: f.said(REASONING, ANSWER),
        {"finish_reason": "length", "max_new_tokens": None}, set(), {"ended_at_cap"},
    ),
    "foreign_special_token": (
        anyone, lambda f: [*to_answer(f), 304, f.foreign, 305, f.end], {}, {"foreign_special_token"}, set()
    ),
    "foreign_in_reasoning": (
        thinks, lambda f: f.said([301, f.foreign], ANSWER), {}, {"foreign_special_token"}, set()
    ),
    "foreign_in_arguments": (
        tools, lambda f: f.called(REASONING, f.call(0, (310, f.foreign))), {}, {"foreign_special_token"}, set()
    ),
    "negative_id": (anyone, lambda f: [*to_answer(f), -1, 305, f.end], {}, {"id_out_of_range"}, set()),
    "id_past_vocabulary": (
        anyone, lambda f: [*to_answer(f), f.grammar.vocabulary_size, 305, f.end], {}, {"id_out_of_range"}, set()
    ),
    "count_mismatch": (
        anyone, lambda f: f.said(REASONING, ANSWER), {"completion_tokens": 90}, {"count_mismatch"}, set()
    ),
    "tool_without_section": (
        section, lambda f: in_tools(f, *ANSWER, *f.call(), f.section_end), {}, {"tool_unbalanced"}, set()
    ),
    "tool_section_not_ended": (
        section, lambda f: in_tools(f, f.section_begin, *f.call()), {}, {"tool_unbalanced"}, set()
    ),
    "tool_call_not_begun": (tools, lambda f: in_tools(f, *f.section(f.call()[1:])), {}, {"tool_unbalanced"}, set()),
    "tool_call_not_ended": (tools, lambda f: in_tools(f, *f.section(f.call()[:-1])), {}, {"tool_unbalanced"}, set()),
    "tool_call_without_arguments": (
        separated, lambda f: in_tools(f, *f.section([f.call_begin, 320, f.call_end])), {}, {"tool_unbalanced"}, set()
    ),
    "tool_section_without_call": (
        section, lambda f: in_tools(f, *ANSWER, *f.section()), {}, {"tool_unbalanced"}, set()
    ),
    "text_between_calls": (
        section, lambda f: in_tools(f, *f.section(f.call(), [305], f.call(1))), {}, {"tool_unbalanced"}, set()
    ),
    "calls_among_text": (
        lambda f: tools(f) and not section(f),
        lambda f: in_tools(f, *ANSWER, *f.call(), f.blank, *f.call(1), 306), {}, set(), set(),
    ),
    "second_tool_section": (
        section, lambda f: in_tools(f, *f.section(f.call()), *f.section(f.call(1))), {}, {"tool_unbalanced"}, set()
    ),
    "tool_token_in_reasoning": (
        lambda f: tools(f) and f.thinks, lambda f: f.said([301, f.call_end, 302], ANSWER),
        {}, {"tool_unbalanced"}, set(),
    ),
    "section_in_section": (
        section, lambda f: in_tools(f, f.section_begin, *f.section(f.call())), {}, {"tool_nested"}, set()
    ),
    "call_in_call": (
        tools,
        lambda f: in_tools(f, *f.section([*f.call()[:2], *f.call(1)])),
        {}, {"tool_nested"}, set(),
    ),
    "section_tokens_swapped": (
        section, lambda f: in_tools(f, f.section_end, *f.call(), f.section_begin), {}, {"tool_unbalanced"}, set()
    ),
    "section_begun_after_its_call": (
        section, lambda f: in_tools(f, *f.call(), f.section_begin, f.section_end), {}, {"tool_unbalanced"}, set()
    ),
    "call_begun_after_its_argument": (
        separated,
        lambda f: in_tools(f, *f.section([f.argument_begin, 320, f.call_begin, 310, f.call_end])),
        {}, {"tool_unbalanced"}, set(),
    ),
    "call_end_before_the_answer": (tools, lambda f: in_tools(f, f.call_end, *ANSWER), {}, {"tool_unbalanced"}, set()),
    "foreign_before_opening": (
        opened, lambda f: [f.foreign, *f.said(REASONING, ANSWER)], {}, {"foreign_special_token"}, set()
    ),
    "argument_without_pairs": (
        pairs, lambda f: in_tools(f, f.call_begin, 320, f.call_end), {}, set(), set()
    ),
    "argument_without_value": (
        pairs, lambda f: in_tools(f, f.call_begin, 320, f.key_begin, 330, f.key_end, f.call_end),
        {}, {"tool_unbalanced"}, set(),
    ),
    "text_between_key_and_value": (
        pairs,
        lambda f: in_tools(f, *f.call()[:5], 306, *f.call()[5:]), {}, {"tool_unbalanced"}, set(),
    ),
    "value_without_key": (
        pairs, lambda f: in_tools(f, f.call_begin, 320, f.value_begin, 310, f.value_end, f.call_end),
        {}, {"tool_unbalanced"}, set(),
    ),
    "preamble_before_a_call": (
        channels,
        lambda f: [*f.think(REASONING), *f.closing[:4], *f.texts["commentary"], f.message, 304, *f.closing[:3],
                   *f.call()],
        {}, set(), set(),
    ),
    "analysis_after_a_preamble": (
        channels,
        lambda f: [*f.think(REASONING), *f.closing[:4], *f.texts["commentary"], f.message, 304, *f.closing[:3],
                   *f.opening, 306, *f.closing, *ANSWER, f.end],
        {}, set(), set(),
    ),
    "recipient_before_the_channel": (
        channels, lambda f: [*f.think(REASONING), *f.closing[:3], RECIPIENT, *f.call()], {}, set(), set()
    ),
    "final_message_ended_as_in_history": (
        channels, lambda f: [*to_answer(f), *ANSWER, f.message_end], {}, set(), set()
    ),
    "call_without_recipient": (
        channels, lambda f: [*to_answer(f), *ANSWER, f.ids["<|call|>"]], {}, {"tool_unbalanced"}, set()
    ),
    "call_ended_as_an_answer": (
        channels, lambda f: [*f.called(REASONING, f.call())[:-1], f.end], {}, {"tool_unbalanced"}, set()
    ),
    "another_role": (
        channels, lambda f: [*f.think(REASONING), *f.closing[:2], 305, *f.closing[3:], *ANSWER, f.end],
        {}, {"foreign_special_token"}, set(),
    ),
    "unknown_channel": (
        channels, lambda f: [*f.think(REASONING), *f.closing[:4], f.message, *ANSWER, f.end],
        {}, {"foreign_special_token"}, set(),
    ),
    "aborted": (anyone, to_answer, {"finish_reason": {"type": "abort", "message": "x"}}, {"aborted"}, set()),
    "aborted_before_a_token": (anyone, lambda f: [], {"finish_reason": "abort"}, {"aborted"}, set()),
    "loop_to_the_end": (
        anyone, lambda f: [*f.think([*range(300, 500)]), *f.closing, *range(300, 500), *[501, 502] * 24, f.end],
        {}, {"loop"}, set(),
    ),
    "loop_over_a_quarter": (
        anyone, lambda f: [*f.think([300]), *f.closing, *[501] * 60, *range(300, 400), f.end], {}, {"loop"}, set()
    ),
    "repetition": (
        anyone, lambda f: [*f.think([301]), *f.closing, *range(300, 500), *[501] * 48, *range(300, 350), f.end],
        {}, set(), {"repetition"},
    ),
    "too_short_a_cycle": (
        anyone, lambda f: [*f.think([301]), *f.closing, *range(300, 500), *[501] * 47, f.end], {}, set(), set()
    ),
    "truncated_in_opening": (
        opened, lambda f: list(f.opening[:1]), {"finish_reason": "length"}, set(), {"truncated_in_reasoning"}
    ),
    "truncated_in_reasoning": (
        thinks, lambda f: f.think(REASONING), {"finish_reason": "length"}, set(), {"truncated_in_reasoning"}
    ),
    "truncated_in_answer": (
        anyone, lambda f: [*to_answer(f), 304], {"finish_reason": "length"}, set(), {"truncated_in_answer"}
    ),
    "truncated_before_answer": (thinks, to_answer, {"finish_reason": "length"}, set(), {"truncated_in_answer"}),
    "truncated_in_tool_call": (
        lambda f: tools(f) or channels(f),
        lambda f: f.called(REASONING, f.call())[: -2 if channels(f) else -3],
        {"finish_reason": "length"}, set(), {"truncated_in_tool_call"},
    ),
    "truncated_without_finish_reason": (
        thinks, lambda f: f.think(REASONING), {"finish_reason": None, "max_new_tokens": 3},
        set(), {"truncated_in_reasoning"},
    ),
    "close_missing_before_tools": (
        lambda f: f.profile.reasoning.closed_by_tools,
        lambda f: [*f.think(REASONING), *f.section(f.call()), f.end], {}, set(), {"close_missing_before_tools"},
    ),
    "close_missing_where_the_family_does_not": (
        lambda f: tools(f) and f.thinks and not f.profile.reasoning.closed_by_tools,
        lambda f: [*f.think(REASONING), *f.section(f.call()), f.end], {}, {"no_close"}, set(),
    ),
    "close_after_tools": (
        lambda f: f.profile.reasoning.closed_by_tools,
        lambda f: [*f.think(REASONING), *f.section(f.call()), f.close, f.end],
        {}, {"second_close"}, {"close_missing_before_tools"},
    ),
    # Nothing but the four reasons that a cut explains is suppressed by it.
    "cut_but_corrupt": (
        tags, lambda f: [*to_answer(f), f.close, f.foreign],
        {"finish_reason": "length"}, {"second_close", "foreign_special_token"}, {"truncated_in_answer"},
    ),
}  # fmt: skip
CHOSEN = [(case, name) for case, (chosen, *_) in CASES.items() for name in ALL if chosen(family(name))]


@pytest.mark.parametrize(("case", "f"), CHOSEN, indirect=["f"])
def test_each_failure_has_its_reason(f: Family, case: str) -> None:
    _, make, options, reasons, flags = CASES[case]
    verdict = f.judge(make(f), **options)
    assert said(verdict) == (reasons, flags)
    assert verdict.kept == (not reasons)
    assert set(verdict.positions) == reasons | flags


def test_every_reason_that_ids_alone_can_show_has_a_case() -> None:
    shown = {name for *_, reasons, flags in CASES.values() for name in reasons | flags}
    elsewhere = {"prompt_not_open", "prompt_echoed", "think_tag_while_off", "prompt_mismatch", "mask_mismatch"}
    assert shown | elsewhere | {"mask_empty", *TEXT_RULES} == set(RULES)


def test_a_response_of_no_tokens_has_neither_answer_nor_end(f: Family) -> None:
    expected = {"missing_end", "empty_answer"} | ({"no_close"} if f.thinks else set())
    assert said(f.judge([], finish_reason="length")) == (expected, set())


# A few equal ordinary tokens are chance.
@families(lambda f: not ordinary_tail(f))
def test_the_prompt_s_own_end_at_the_response_s_start_is_an_echo(f: Family) -> None:
    assert "prompt_echoed" in f.judge([*f.prompt[-4:], *f.said(REASONING, ANSWER)]).reasons


def test_positions_point_at_the_token_to_blame(f: Family) -> None:
    output = [*to_answer(f), 304, f.foreign, f.end, 306]
    end = len(output) - 2
    assert f.judge(output).positions == {"foreign_special_token": (end - 1,), "tokens_after_end": (end + 1,)}


@families(lambda f: f.profile.reasoning.opens_in != "never")
def test_prompt_that_does_not_leave_reasoning_as_the_family_does_is_corrupt(f: Family) -> None:
    prompt = f.header if f.profile.reasoning.opens_in == "prompt" else f.header[:-1]
    verdict = f.judge(f.said(REASONING, ANSWER), prompt=list(prompt))
    assert said(verdict) == ({"prompt_not_open"}, set())


@families(lambda f: bool(f.grammar.behind_open))
def test_prompt_without_the_white_space_behind_its_tag_is_open_unless_the_response_has_it(f: Family) -> None:
    behind = f.grammar.behind_open
    prompt = f.prompt[: -len(behind)]
    assert f.judge(f.said(REASONING, ANSWER), prompt=prompt).kept
    cut_early = f.judge([*behind, *f.said(REASONING, ANSWER)], prompt=prompt)
    assert said(cut_early) == ({"prompt_not_open"}, set())


@families(lambda f: opened(f) and tags(f))
def test_prompt_that_opens_what_the_model_should_open_is_corrupt(f: Family) -> None:
    prompt = [*f.prompt, f.open]
    assert said(f.judge([*REASONING, *f.closing, *ANSWER, f.end], prompt=prompt)) == ({"no_open"}, set())
    assert "second_open" in f.judge([f.open, *REASONING, *f.closing, *ANSWER, f.end], prompt=prompt).reasons


@families(lambda f: bool(f.prompt_off))
def test_thinking_off_holds_neither_tag(f: Family) -> None:
    assert f.judge([*ANSWER, f.end], prompt=f.prompt_off).kept
    for tag in (f.open, f.close):
        verdict = f.judge([304, tag, 305, f.end], prompt=f.prompt_off)
        assert said(verdict) == ({"think_tag_while_off"}, set())


def test_a_family_that_need_not_reason_may_do_so_in_text_or_not() -> None:
    f = family("deepseek_v3_0324")
    header = list(f.header)
    assert f.judge([*ANSWER, f.end], prompt=header).kept
    opening, closing = f.texts["<think>"], f.texts["</think>\n\n"]
    verdict = f.judge([*opening, *REASONING, *closing, *ANSWER, f.end], prompt=header)
    assert (verdict.kept, verdict.reasoning_tokens, verdict.answer_tokens) == (True, 3, 2)
    assert [span.stop - span.start for span in verdict.spans if span.kind == "boundary"] == [3, 3]
    cut = f.judge([*REASONING, *closing[:-1]], finish_reason="length")
    assert said(cut) == (set(), {"truncated_in_reasoning"})


def test_reasoning_that_quotes_the_prompt_is_no_echo(f: Family) -> None:
    # The first tokens of a prompt's text may well open the reasoning; its special tokens never do.
    prompt = [*range(300, 310), *f.prompt]
    assert "prompt_echoed" not in f.judge([*range(300, 310), *f.closing, *ANSWER, f.end], prompt=prompt).reasons
    whole = f.judge([*prompt, *f.said(REASONING, ANSWER)], prompt=prompt)
    assert "prompt_echoed" in whole.reasons


def test_family_that_opens_its_own_reasoning_must_open_first() -> None:
    shipped = load_profile("demo")
    reasoning = shipped.reasoning.model_copy(update={"opens_in": "response", "closed_by_tools": False})
    profile = shipped.model_copy(update={"reasoning": reasoning, "generation_prompt_tail": ()})
    ids = {token: 900 + i for i, token in enumerate(
        ["<|im_end|>", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
         "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_user|>"])}  # fmt: skip
    grammar = compile_grammar(profile, ids, 1000)
    end, opening, close, section = 900, 901, 902, [903, 905, 1, 906, 2, 907, 904]

    def reasons(*output: int) -> tuple[str, ...]:
        return judge([908, 1], output, grammar=grammar, finish_reason="stop").reasons

    assert reasons(opening, 5, close, 6, end) == ()
    assert reasons(5, close, 6, end) == ("no_open",)
    assert reasons(6, end) == ("no_open",)
    assert reasons(opening, 5, opening, close, 6, end) == ("second_open",)
    # Only a family that is known to do so may skip the close tag before tools.
    assert reasons(opening, 5, *section, end) == ("no_close",)


@families(thinks)
def test_policy_turns_a_flag_into_a_quarantine_and_keeps_the_flag(f: Family) -> None:
    verdict = f.judge(f.think(REASONING), finish_reason="length")
    dropped = apply_policy(verdict, check_drop_flags(["truncated_in_reasoning"]))
    assert (dropped.verdict, dropped.reasons) == ("quarantined", ("policy:truncated_in_reasoning",))
    assert dropped.flags == ("truncated_in_reasoning",)
    assert apply_policy(verdict, {"repetition"}) is verdict


def test_policy_with_a_misspelt_flag_is_refused() -> None:
    with pytest.raises(BadInput, match="truncated_in_thought"):
        check_drop_flags(["truncated_in_thought"])
    assert not CORRUPT & FLAGS


def test_finish_reason_of_no_known_type_is_refused(f: Family) -> None:
    with pytest.raises(BadInput, match="content_filter"):
        f.judge(f.said(REASONING, ANSWER), finish_reason="content_filter")


def test_what_no_input_allows_to_check_is_listed_not_passed(f: Family) -> None:
    verdict = judge(f.prompt, f.said(REASONING, ANSWER), grammar=f.grammar)
    assert set(verdict.unchecked) == {"stop_without_end", "end_without_stop", "aborted", "count_mismatch"}


def test_checkpoint_with_other_ids_than_the_profile_expects_is_refused() -> None:
    profile = load_profile("kimi_k25")
    moved = {**profile.expected_ids, "<think>": 163_608}
    with pytest.raises(BadInput, match=r"'<think>' has id 163608 .* expected 163606"):
        compile_grammar(profile, moved, 163_840)


def test_loss_mask_trains_the_end_token_and_nothing_after(f: Family) -> None:
    output = f.said(REASONING, ANSWER)
    prompt = len(f.prompt)
    mask = response_mask(prompt, len(output), f.judge(output).end)
    assert mask.tolist() == [0] * prompt + [1] * len(output)
    longer = [*output, 306]
    mask = response_mask(prompt, len(longer), f.judge(longer).end)
    assert mask.tolist() == [0] * prompt + [1] * len(output) + [0]
    cut = f.think(REASONING)
    assert response_mask(prompt, len(cut), f.judge(cut, finish_reason="length").end).tolist() == (
        [0] * prompt + [1] * len(cut)
    )
