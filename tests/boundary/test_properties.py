"""The grammar against an independent statement of it (a regular expression), over the space of responses."""

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.boundary import judge, judge_mask, response_mask

from .families import Family, family

FAMILIES = st.sampled_from(["demo", "kimi_k25"]).map(family)

# One letter a token; "o" is an ordinary one.
LETTERS = {"C": "close", "S": "section_begin", "B": "call_begin", "G": "argument_begin", "E": "call_end",
           "T": "section_end", "N": "end", "O": "open", "F": "foreign", "w": "blank"}  # fmt: skip
SECTION = r"Sw*(B[ow]*G[ow]*Ew*)+T"
WELL_FORMED = re.compile(rf"[ow]*o[ow]*C(?:[ow]*{SECTION}[ow]*|[ow]*o[ow]*)N")
STRAIGHT_TO_TOOLS = re.compile(rf"[ow]*o[ow]*{SECTION}[ow]*N")

TEXT = st.text("ow", max_size=4)
WRITTEN = TEXT.map(lambda text: f"w{text}o")
CALL = st.builds("B{}G{}E".format, TEXT, TEXT)
TOOLS = st.lists(CALL, min_size=1, max_size=3).map(lambda calls: f"S{''.join(calls)}T")
RESPONSES = st.builds("{}C{}N".format, WRITTEN, st.one_of(WRITTEN, TOOLS, st.builds("{}{}".format, WRITTEN, TOOLS)))


def ids_of(letters: str, f: Family) -> list[int]:
    """Ids of a response; every ordinary token is another, so that nothing repeats."""
    text = iter(f.text)
    return [next(text) if letter == "o" else getattr(f, LETTERS[letter]) for letter in letters]


@given(FAMILIES, RESPONSES)
def test_any_well_formed_response_is_kept_with_its_mask(f: Family, letters: str) -> None:
    assert WELL_FORMED.fullmatch(letters)
    output = ids_of(letters, f)
    verdict = f.judge(output)
    assert (verdict.reasons, verdict.flags) == ((), ())
    assert verdict.reasoning_tokens == letters.index("C")
    assert verdict.tool_calls == letters.count("B")
    mask = response_mask(len(f.prompt), len(output), verdict.end)
    assert mask.tolist() == [0] * len(f.prompt) + [1] * len(output)
    assert judge_mask([*f.prompt, *output], mask.tolist(), f.grammar).kept


SHUFFLED = RESPONSES.flatmap(lambda letters: st.permutations(letters)).map("".join)


@settings(max_examples=400)
@given(FAMILIES, st.one_of(st.text("owCSBGETNOF", max_size=14), SHUFFLED))
def test_a_response_passes_exactly_when_the_grammar_derives_it(f: Family, letters: str) -> None:
    verdict = f.judge(ids_of(letters, f))
    assert (not verdict.reasons and not verdict.flags) == bool(WELL_FORMED.fullmatch(letters))
    if STRAIGHT_TO_TOOLS.fullmatch(letters):
        assert (verdict.reasons, verdict.flags) == ((), ("close_missing_before_tools",))


@settings(max_examples=300)
@given(FAMILIES, RESPONSES, st.data())
def test_a_moved_or_swapped_special_token_never_passes_unless_the_result_is_well_formed(
    f: Family, letters: str, data: st.DataObject
) -> None:
    special = [i for i, letter in enumerate(letters) if letter.isupper()]
    source = data.draw(st.sampled_from(special))
    target = data.draw(st.integers(0, len(letters) - 1))
    if data.draw(st.booleans()):
        rest = letters[:source] + letters[source + 1 :]
        moved = rest[:target] + letters[source] + rest[target:]
    else:
        swapped = list(letters)
        swapped[source], swapped[target] = swapped[target], swapped[source]
        moved = "".join(swapped)
    verdict = f.judge(ids_of(moved, f))
    assert (not verdict.reasons and not verdict.flags) == bool(WELL_FORMED.fullmatch(moved))


def expected_when_dropped(letters: str, index: int) -> set[str]:
    letter, following = letters[index], letters[index + 1 :]
    if letter == "N":
        return {"missing_end", "stop_without_end"}
    if letter == "C":
        return {"close_missing_before_tools"} if "S" in following else {"no_close", "empty_answer"}
    if letter == "E" and following.startswith("B"):
        return {"tool_nested"}
    return {"tool_unbalanced"}


@given(FAMILIES, RESPONSES, st.data())
def test_a_dropped_special_token_gives_its_reason(f: Family, letters: str, data: st.DataObject) -> None:
    index = data.draw(st.sampled_from([i for i, letter in enumerate(letters) if letter.isupper()]))
    verdict = f.judge(ids_of(letters[:index] + letters[index + 1 :], f))
    assert {*verdict.reasons, *verdict.flags} == expected_when_dropped(letters, index)


DOUBLED = {"C": "second_close", "S": "tool_nested", "B": "tool_nested", "G": "tool_unbalanced", "E": "tool_unbalanced",
           "T": "tool_unbalanced", "N": "tokens_after_end"}  # fmt: skip


@given(FAMILIES, RESPONSES, st.data())
def test_a_doubled_special_token_gives_its_reason(f: Family, letters: str, data: st.DataObject) -> None:
    index = data.draw(st.sampled_from([i for i, letter in enumerate(letters) if letter.isupper()]))
    verdict = f.judge(ids_of(letters[:index] + letters[index] + letters[index:], f))
    assert {*verdict.reasons, *verdict.flags} == {DOUBLED[letters[index]]}


@given(FAMILIES, RESPONSES, st.data())
def test_a_cut_anywhere_is_a_truncation_and_nothing_else(f: Family, letters: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(letters) - 1))
    left = letters[:length]
    verdict = f.judge(ids_of(left, f), finish_reason="length", max_new_tokens=length)
    if "C" not in left:
        expected = "truncated_in_reasoning"
    elif "S" in left and "T" not in left:
        expected = "truncated_in_tool_call"
    else:
        expected = "truncated_in_answer"
    assert (verdict.reasons, verdict.flags) == ((), (expected,))


@given(FAMILIES, RESPONSES, st.text("owCSBGETNOF", min_size=1, max_size=5))
def test_anything_appended_is_tokens_after_the_end(f: Family, letters: str, appended: str) -> None:
    assert "tokens_after_end" in f.judge(ids_of(letters + appended, f)).reasons


@settings(max_examples=300)
@given(
    FAMILIES,
    st.lists(st.integers(), max_size=60),
    st.lists(st.one_of(st.integers(), st.integers(0, 1023), st.integers(163_580, 163_610)), max_size=200),
    st.sampled_from([None, "stop", "length", "abort"]),
    st.one_of(st.none(), st.integers()),
)
def test_arbitrary_integers_are_judged_not_raised(
    f: Family, prompt: list[int], output: list[int], finish: str | None, cap: int | None
) -> None:
    verdict = judge(prompt, output, grammar=f.grammar, finish_reason=finish, max_new_tokens=cap)
    assert verdict.kept == (not verdict.reasons)
    covered = [index for span in verdict.spans for index in range(span.start, span.stop)]
    assert covered == list(range(len(output)))
    assert all(0 <= index < len(output) for at in verdict.positions.values() for index in at)


@given(FAMILIES, st.lists(st.integers(0, 163_839), max_size=60), st.lists(st.integers(-1, 2), max_size=60))
def test_arbitrary_masks_are_judged_not_raised(f: Family, ids: list[int], mask: list[int]) -> None:
    verdict = judge_mask(ids, mask, f.grammar)
    if len(ids) == len(mask) and set(mask) == {0}:
        assert verdict.reasons == ("mask_empty",)
    if len(ids) != len(mask) or not set(mask) <= {0, 1}:
        assert verdict.reasons == ("mask_mismatch",)


@given(RESPONSES)
def test_lists_and_arrays_of_either_width_are_judged_alike(letters: str) -> None:
    f = family("kimi_k25")
    output = ids_of(letters, f)
    expected = judge(f.prompt, output, grammar=f.grammar)
    for dtype in (np.int32, np.int64):
        found = judge(np.array(f.prompt, dtype), np.array(output, dtype), grammar=f.grammar)
        assert found == expected
