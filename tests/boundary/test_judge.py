"""A hand-made case for every reason, for each shipped family with its real ids."""

import pytest

from aerie.boundary import (
    CORRUPT,
    FLAGS,
    Verdict,
    apply_policy,
    check_drop_flags,
    compile_grammar,
    judge,
    response_mask,
)
from aerie.errors import BadInput
from aerie.settings.profile import load_profile

from .families import Family, family

REASONING = [301, 302, 303]
ANSWER = [304, 305]


def said(verdict: Verdict) -> tuple[set[str], set[str]]:
    return set(verdict.reasons), set(verdict.flags)


def test_well_formed_answer_is_kept_and_counted(f: Family) -> None:
    verdict = f.judge([*REASONING, f.close, *ANSWER, f.end])
    assert (verdict.verdict, said(verdict)) == ("kept", (set(), set()))
    assert (verdict.reasoning_tokens, verdict.answer_tokens, verdict.tool_calls, verdict.unchecked) == (3, 2, 0, ())


def test_well_formed_tool_calls_are_kept_located_and_wait_for_text(f: Family) -> None:
    output = [*REASONING, f.close, *ANSWER, *f.section(f.call(0), f.call(1)), f.end]
    verdict = f.judge(output)
    assert said(verdict) == (set(), set())
    assert verdict.tool_calls == 2
    assert [output[c.id_start : c.id_stop] for c in verdict.calls] == [[320], [321]]
    assert [output[c.arguments_start : c.arguments_stop] for c in verdict.calls] == [[310, 311]] * 2
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


CASES = {
    # name: (output, options, reasons, flags); a callable takes the family
    "no_close": (lambda f: [*REASONING, f.end], {}, {"no_close", "empty_answer"}, set()),
    "second_open": (lambda f: [f.open, *REASONING, f.close, *ANSWER, f.end], {}, {"second_open"}, set()),
    "second_open_in_answer": (lambda f: [*REASONING, f.close, f.open, *ANSWER, f.end], {}, {"second_open"}, set()),
    "second_close": (lambda f: [*REASONING, f.close, *ANSWER, f.close, 306, f.end], {}, {"second_close"}, set()),
    "empty_reasoning": (lambda f: [f.close, *ANSWER, f.end], {}, {"empty_reasoning"}, set()),
    "white_reasoning": (lambda f: [f.blank, f.blank, f.close, *ANSWER, f.end], {}, {"empty_reasoning"}, set()),
    "empty_answer": (lambda f: [*REASONING, f.close, f.end], {}, {"empty_answer"}, set()),
    "white_answer": (lambda f: [*REASONING, f.close, f.blank, f.end], {}, {"empty_answer"}, set()),
    "stripped_end": (lambda f: [*REASONING, f.close, *ANSWER], {}, {"missing_end", "stop_without_end"}, set()),
    "missing_end": (lambda f: [*REASONING, f.close, *ANSWER], {"finish_reason": None}, {"missing_end"}, set()),
    "tokens_after_end": (lambda f: [*REASONING, f.close, *ANSWER, f.end, 306], {}, {"tokens_after_end"}, set()),
    "end_twice": (lambda f: [*REASONING, f.close, *ANSWER, f.end, f.end], {}, {"tokens_after_end"}, set()),
    "end_without_stop": (
        lambda f: [*REASONING, f.close, *ANSWER, f.end], {"finish_reason": "length"}, {"end_without_stop"}, set()
    ),
    "ended_at_cap": (
        lambda f: [*REASONING, f.close, *ANSWER, f.end],
        {"finish_reason": {"type": "length", "length": 7}, "max_new_tokens": 7}, set(), {"ended_at_cap"},
    ),
    "ended_at_unknown_cap": (
        lambda f: [*REASONING, f.close, *ANSWER, f.end],
        {"finish_reason": "length", "max_new_tokens": None}, set(), {"ended_at_cap"},
    ),
    "foreign_special_token": (
        lambda f: [*REASONING, f.close, 304, f.foreign, 305, f.end], {}, {"foreign_special_token"}, set()
    ),
    "foreign_in_arguments": (
        lambda f: [*REASONING, f.close, *f.section(f.call(0, (310, f.foreign))), f.end],
        {}, {"foreign_special_token"}, set(),
    ),
    "negative_id": (lambda f: [*REASONING, f.close, -1, 305, f.end], {}, {"id_out_of_range"}, set()),
    "id_past_vocabulary": (
        lambda f: [*REASONING, f.close, f.grammar.vocabulary_size, 305, f.end], {}, {"id_out_of_range"}, set()
    ),
    "prompt_tail_echoed": (
        lambda f: [*f.prompt[-4:], *REASONING, f.close, *ANSWER, f.end],
        {}, {"prompt_echoed", "foreign_special_token", "second_open"}, set(),
    ),
    "count_mismatch": (
        lambda f: [*REASONING, f.close, *ANSWER, f.end], {"completion_tokens": 9}, {"count_mismatch"}, set()
    ),
    "tool_without_section": (
        lambda f: [*REASONING, f.close, *ANSWER, *f.call(), f.section_end, f.end], {}, {"tool_unbalanced"}, set()
    ),
    "tool_section_not_ended": (
        lambda f: [*REASONING, f.close, f.section_begin, *f.call(), f.end], {}, {"tool_unbalanced"}, set()
    ),
    "tool_call_not_ended": (
        lambda f: [*REASONING, f.close, *f.section(f.call()[:-1]), f.end], {}, {"tool_unbalanced"}, set()
    ),
    "tool_call_without_arguments": (
        lambda f: [*REASONING, f.close, *f.section([f.call_begin, 320, f.call_end]), f.end],
        {}, {"tool_unbalanced"}, set(),
    ),
    "tool_section_without_call": (
        lambda f: [*REASONING, f.close, *ANSWER, *f.section(), f.end], {}, {"tool_unbalanced"}, set()
    ),
    "text_between_calls": (
        lambda f: [*REASONING, f.close, *f.section(f.call(), [305], f.call(1)), f.end], {}, {"tool_unbalanced"}, set()
    ),
    "second_tool_section": (
        lambda f: [*REASONING, f.close, *f.section(f.call()), *f.section(f.call(1)), f.end],
        {}, {"tool_unbalanced"}, set(),
    ),
    "tool_token_in_reasoning": (
        lambda f: [301, f.call_end, 302, f.close, *ANSWER, f.end], {}, {"tool_unbalanced"}, set()
    ),
    "section_in_section": (
        lambda f: [*REASONING, f.close, f.section_begin, *f.section(f.call()), f.end], {}, {"tool_nested"}, set()
    ),
    "call_in_call": (
        lambda f: [*REASONING, f.close, *f.section([f.call_begin, 320, f.argument_begin, *f.call(1)]), f.end],
        {}, {"tool_nested"}, set(),
    ),
    "aborted": (lambda f: REASONING, {"finish_reason": {"type": "abort", "message": "x"}}, {"aborted"}, set()),
    "aborted_before_a_token": (lambda f: [], {"finish_reason": "abort"}, {"aborted"}, set()),
    "loop_to_the_end": (
        lambda f: [*range(300, 500), f.close, *range(300, 400), *[501, 502] * 24, f.end], {}, {"loop"}, set()
    ),
    "loop_over_a_quarter": (lambda f: [*[501] * 60, 300, f.close, *range(300, 400), f.end], {}, {"loop"}, set()),
    "repetition": (
        lambda f: [*range(300, 500), f.close, 300, *[501] * 48, *range(300, 350), f.end], {}, set(), {"repetition"}
    ),
    "too_short_a_cycle": (
        lambda f: [*range(300, 500), f.close, 300, *[501] * 47, f.end], {}, set(), set()
    ),
    "truncated_in_reasoning": (lambda f: REASONING, {"finish_reason": "length"}, set(), {"truncated_in_reasoning"}),
    "truncated_in_answer": (
        lambda f: [*REASONING, f.close, 304], {"finish_reason": "length"}, set(), {"truncated_in_answer"}
    ),
    "truncated_before_answer": (
        lambda f: [*REASONING, f.close], {"finish_reason": "length"}, set(), {"truncated_in_answer"}
    ),
    "truncated_in_tool_call": (
        lambda f: [*REASONING, f.close, *f.section(f.call())[:4]],
        {"finish_reason": "length"}, set(), {"truncated_in_tool_call"},
    ),
    "truncated_without_finish_reason": (
        lambda f: REASONING, {"finish_reason": None, "max_new_tokens": 3}, set(), {"truncated_in_reasoning"}
    ),
    "close_missing_before_tools": (
        lambda f: [*REASONING, *f.section(f.call()), f.end], {}, set(), {"close_missing_before_tools"}
    ),
    "close_after_tools": (
        lambda f: [*REASONING, *f.section(f.call()), f.close, f.end],
        {}, {"second_close"}, {"close_missing_before_tools"},
    ),
    "nothing_written": (
        lambda f: [], {"finish_reason": "length"}, {"no_close", "missing_end", "empty_answer"}, set()
    ),
    # Nothing but the four reasons that a cut explains is suppressed by it.
    "cut_but_corrupt": (
        lambda f: [*REASONING, f.close, f.close, f.foreign],
        {"finish_reason": "length"}, {"second_close", "foreign_special_token"}, {"truncated_in_answer"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_failure_has_its_reason(f: Family, case: str) -> None:
    make, options, reasons, flags = CASES[case]
    verdict = f.judge(make(f), **options)
    assert said(verdict) == (reasons, flags)
    assert verdict.kept == (not reasons)
    assert set(verdict.positions) == reasons | flags


def test_positions_point_at_the_token_to_blame(f: Family) -> None:
    verdict = f.judge([*REASONING, f.close, 304, f.foreign, f.close, f.end, 306])
    assert verdict.positions == {"foreign_special_token": (5,), "second_close": (6,), "tokens_after_end": (8,)}


def test_prompt_that_does_not_leave_reasoning_open_is_corrupt(f: Family) -> None:
    verdict = f.judge([*REASONING, f.close, *ANSWER, f.end], prompt=list(f.header))
    assert said(verdict) == ({"prompt_not_open"}, set())


def test_thinking_off_holds_neither_tag(f: Family) -> None:
    assert f.judge([*ANSWER, f.end], prompt=f.prompt_off).kept
    for tag in (f.open, f.close):
        verdict = f.judge([304, tag, 305, f.end], prompt=f.prompt_off)
        assert said(verdict) == ({"think_tag_while_off"}, set())


def test_reasoning_that_quotes_the_prompt_is_no_echo(f: Family) -> None:
    # The first tokens of a prompt's text may well open the reasoning; its special tokens never do.
    prompt = [*range(300, 310), *f.prompt]
    assert f.judge([*range(300, 310), f.close, *ANSWER, f.end], prompt=prompt).kept
    whole = f.judge([*prompt, *REASONING, f.close, *ANSWER, f.end], prompt=prompt)
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


def test_policy_turns_a_flag_into_a_quarantine_and_keeps_the_flag(f: Family) -> None:
    verdict = f.judge(REASONING, finish_reason="length")
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
        f.judge([*REASONING, f.close, *ANSWER, f.end], finish_reason="content_filter")


def test_what_no_input_allows_to_check_is_listed_not_passed(f: Family) -> None:
    verdict = judge(f.prompt, [*REASONING, f.close, *ANSWER, f.end], grammar=f.grammar)
    assert set(verdict.unchecked) == {"stop_without_end", "end_without_stop", "aborted", "count_mismatch"}


def test_checkpoint_with_other_ids_than_the_profile_expects_is_refused() -> None:
    profile = load_profile("kimi_k25")
    moved = {**profile.expected_ids, "<think>": 163_608}
    with pytest.raises(BadInput, match=r"'<think>' has id 163608 .* expected 163606"):
        compile_grammar(profile, moved, 163_840)


def test_loss_mask_trains_the_end_token_and_nothing_after(f: Family) -> None:
    output = [*REASONING, f.close, *ANSWER, f.end]
    prompt = len(f.prompt)
    mask = response_mask(prompt, len(output), f.judge(output).end)
    assert mask.tolist() == [0] * prompt + [1] * len(output)
    longer = [*output, 306]
    mask = response_mask(prompt, len(longer), f.judge(longer).end)
    assert mask.tolist() == [0] * prompt + [1] * len(output) + [0]
    cut = response_mask(prompt, 2, f.judge(REASONING[:2], finish_reason="length").end)
    assert cut.tolist() == [0] * prompt + [1, 1]
