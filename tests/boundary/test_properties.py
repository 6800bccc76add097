"""The grammar against an independent statement of it (a regular expression), over the space of responses."""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.boundary import judge, judge_mask, response_mask

from .families import ALL, Family, family

# One letter a token (a spelled tag is several); "o" is an ordinary token, "w" white space.
LETTERS = {"C": "close", "S": "section_begin", "B": "call_begin", "G": "argument_begin", "E": "call_end",
           "T": "section_end", "K": "key_begin", "k": "key_end", "V": "value_begin", "v": "value_end", "N": "end",
           "O": "open", "F": "foreign", "w": "blank"}  # fmt: skip
WRITTEN_PATTERN = "[ow]*o[ow]*"
TEXT = st.text("ow", max_size=4)
WRITTEN = TEXT.map(lambda text: f"w{text}o")


@dataclass(frozen=True)
class Shape:
    """A family's format: as a regular expression over letters, and as strategies that write it."""

    family: Family
    call_pattern: str
    calls: st.SearchStrategy[str]
    prefix_pattern: str
    prefixes: st.SearchStrategy[str]

    @property
    def tools_pattern(self) -> str:
        """What may stand in an answer's place, calls in it."""
        if self.family.section_begin >= 0:
            return f"[ow]*Sw*(?:{self.call_pattern}w*)+T[ow]*"
        return f"[ow]*(?:{self.call_pattern}[ow]*)+" if self.call_pattern else "(?!)"

    @property
    def well_formed(self) -> re.Pattern[str]:
        """A whole response."""
        body = f"(?:{self.tools_pattern}|{WRITTEN_PATTERN})N"
        return re.compile(f"{self.prefix_pattern}{WRITTEN_PATTERN}C{body}" if self.family.thinks else body)

    @property
    def straight_to_tools(self) -> re.Pattern[str]:
        """Reasoning that goes to tools without its closing tag."""
        return re.compile(f"{self.prefix_pattern}{WRITTEN_PATTERN}{self.tools_pattern}N")

    @property
    def alphabet(self) -> str:
        """The letters that the family has."""
        return "owNF" + "".join(x for x in "OCSBGETKkVv" if (x in "OC" and self.family.thinks) or self.has(x))

    def has(self, letter: str) -> bool:
        """Whether a letter is a token of the family."""
        return getattr(self.family, LETTERS[letter]) >= 0

    def responses(self) -> st.SearchStrategy[str]:
        """Well-formed responses."""
        answers = [WRITTEN]
        if self.call_pattern:
            calls = st.lists(self.calls, min_size=1, max_size=3).map("".join)
            tools = calls.map("S{}T".format) if self.family.section_begin >= 0 else calls
            answers += [tools, st.builds("{}{}".format, WRITTEN, tools)]
        body = st.one_of(answers).map("{}N".format)
        if not self.family.thinks:
            return body
        return st.builds("{}{}C{}".format, self.prefixes, WRITTEN, body)

    def ids_of(self, letters: str) -> list[int]:
        """Ids of a response; every ordinary token is another, so that nothing repeats."""
        text, f = iter(self.family.text), self.family
        tags = {"O": f.opening[-1:], "C": f.closing}
        if f.thinks and f.open < 0:
            tags["O"] = f.texts[f.profile.reasoning.open.texts[0]]
        elif f.thinks:
            tags["O"] = (f.open,)
        ids: list[int] = []
        for letter in letters:
            ids += [next(text)] if letter == "o" else tags.get(letter) or [getattr(f, LETTERS[letter])]
        return ids


@cache
def shape(name: str) -> Shape:
    f = family(name)
    pattern, calls = "", st.nothing()
    if f.key_begin >= 0:
        pattern = "B[ow]*(?:K[ow]*kw*V[ow]*vw*)*E"
        pairs = st.lists(st.builds("K{}kV{}v".format, TEXT, TEXT), max_size=2).map("".join)
        calls = st.builds("Bo{}E".format, pairs)
    elif f.argument_begin >= 0:
        pattern, calls = "B[ow]*G[ow]*E", st.builds("B{}G{}E".format, TEXT, TEXT)
    elif f.call_begin >= 0:
        pattern, calls = "B[ow]*E", TEXT.map("Bo{}E".format)
    prefix, prefixes = "", st.just("")
    if f.thinks and f.profile.reasoning.opens_in == "response":
        white = f.profile.reasoning.white_space_before_open
        prefix, prefixes = ("w*O", st.text("w", max_size=2).map("{}O".format)) if white else ("O", st.just("O"))
    return Shape(f, pattern, calls, prefix, prefixes)


BY_LETTERS = [name for name in ALL if name != "gpt_oss"]
SHAPES = st.sampled_from(BY_LETTERS).map(shape)
WRITTEN_BY = SHAPES.flatmap(lambda s: st.tuples(st.just(s), s.responses()))
FAMILIES = st.sampled_from(ALL).map(family)


def found(s: Shape, letters: str, **options: object) -> set[str]:
    verdict = s.family.judge(s.ids_of(letters), **options)
    return {*verdict.reasons, *verdict.flags}


def specials(letters: str) -> list[int]:
    return [i for i, letter in enumerate(letters) if letter not in "ow"]


@given(WRITTEN_BY)
def test_any_well_formed_response_is_kept_with_its_mask(written: tuple[Shape, str]) -> None:
    s, letters = written
    assert s.well_formed.fullmatch(letters)
    output, prompt = s.ids_of(letters), s.family.prompt
    verdict = s.family.judge(output)
    assert (verdict.reasons, verdict.flags) == ((), ())
    assert verdict.reasoning_tokens == (letters.index("C") - letters.find("O") - 1 if s.family.thinks else 0)
    assert verdict.tool_calls == letters.count("B")
    mask = response_mask(len(prompt), len(output), verdict.end)
    assert mask.tolist() == [0] * len(prompt) + [1] * len(output)
    assert judge_mask([*prompt, *output], mask.tolist(), s.family.grammar).kept


@settings(max_examples=300)
@given(SHAPES, st.data())
def test_a_response_passes_exactly_when_the_grammar_derives_it(s: Shape, data: st.DataObject) -> None:
    shuffled = s.responses().flatmap(st.permutations).map("".join)
    letters = data.draw(st.one_of(st.text(s.alphabet, max_size=14), shuffled))
    assert (not found(s, letters)) == bool(s.well_formed.fullmatch(letters))
    if s.family.profile.reasoning.closed_by_tools and s.straight_to_tools.fullmatch(letters):
        assert found(s, letters) == {"close_missing_before_tools"}


@settings(max_examples=150)
@given(WRITTEN_BY, st.data())
def test_a_moved_or_swapped_special_token_never_passes_unless_the_result_is_well_formed(
    written: tuple[Shape, str], data: st.DataObject
) -> None:
    s, letters = written
    source = data.draw(st.sampled_from(specials(letters)))
    target = data.draw(st.integers(0, len(letters) - 1))
    if data.draw(st.booleans()):
        rest = letters[:source] + letters[source + 1 :]
        moved = rest[:target] + letters[source] + rest[target:]
    else:
        swapped = list(letters)
        swapped[source], swapped[target] = swapped[target], swapped[source]
        moved = "".join(swapped)
    assert (not found(s, moved)) == bool(s.well_formed.fullmatch(moved))


def expected_when_dropped(s: Shape, letters: str, index: int) -> set[str]:
    letter, following = letters[index], letters[index + 1 :]
    if letter == "N":
        return {"missing_end", "stop_without_end"}
    if letter == "O":
        return {"no_open"}
    if letter == "C" and "B" in following:
        closed_by_tools = s.family.profile.reasoning.closed_by_tools
        return {"close_missing_before_tools"} if closed_by_tools else {"no_close"}
    if letter == "C":
        return {"no_close", "empty_answer"}
    if letter == "E" and "B" in following:
        return {"tool_nested"}
    return {"tool_unbalanced"}


@given(WRITTEN_BY, st.data())
def test_a_dropped_special_token_gives_its_reason(written: tuple[Shape, str], data: st.DataObject) -> None:
    s, letters = written
    index = data.draw(st.sampled_from(specials(letters)))
    assert found(s, letters[:index] + letters[index + 1 :]) == expected_when_dropped(s, letters, index)


DOUBLED = {"O": "second_open", "C": "second_close", "S": "tool_nested", "B": "tool_nested", "N": "tokens_after_end"}


@given(WRITTEN_BY, st.data())
def test_a_doubled_special_token_gives_its_reason(written: tuple[Shape, str], data: st.DataObject) -> None:
    s, letters = written
    index = data.draw(st.sampled_from(specials(letters)))
    doubled = letters[:index] + letters[index] + letters[index:]
    assert found(s, doubled) == {DOUBLED.get(letters[index], "tool_unbalanced")}


@given(WRITTEN_BY, st.data())
def test_a_cut_anywhere_is_a_truncation_and_nothing_else(written: tuple[Shape, str], data: st.DataObject) -> None:
    s, letters = written
    left = letters[: data.draw(st.integers(1, len(letters) - 1))]
    if s.family.thinks and "C" not in left:
        expected = "truncated_in_reasoning"
    elif s.family.section_begin >= 0:
        expected = "truncated_in_tool_call" if "S" in left and "T" not in left else "truncated_in_answer"
    else:
        expected = "truncated_in_tool_call" if left.rfind("B") > left.rfind("E") else "truncated_in_answer"
    assert found(s, left, finish_reason="length", max_new_tokens=None) == {expected}


@given(WRITTEN_BY, st.data())
def test_anything_appended_is_tokens_after_the_end(written: tuple[Shape, str], data: st.DataObject) -> None:
    s, letters = written
    appended = data.draw(st.text(s.alphabet, min_size=1, max_size=5))
    assert "tokens_after_end" in found(s, letters + appended)


ODD_IDS = st.one_of(
    st.integers(), st.integers(0, 1023), *(st.sampled_from(sorted(family(name).ids.values())) for name in ALL)
)


@settings(max_examples=150)
@given(
    FAMILIES,
    st.lists(st.integers(), max_size=60),
    st.lists(ODD_IDS, max_size=200),
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


@given(shape("kimi_k25").responses())
def test_lists_and_arrays_of_either_width_are_judged_alike(letters: str) -> None:
    s = shape("kimi_k25")
    f, output = s.family, s.ids_of(letters)
    expected = judge(f.prompt, output, grammar=f.grammar)
    for dtype in (np.int32, np.int64):
        found = judge(np.array(f.prompt, dtype), np.array(output, dtype), grammar=f.grammar)
        assert found == expected
