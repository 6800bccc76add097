"""Messages with channels against an independent statement of their format, as ``test_properties`` does for tags."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.boundary import judge_mask, response_mask

from .families import family

F = family("gpt_oss")
LETTERS = {
    "H": (F.channel,), "M": (F.message,), "D": (F.message_end,), "Z": (F.start,), "X": (F.constrain,),
    "L": (F.ids["<|call|>"],), "N": (F.end,), "F": (F.foreign,), "w": (F.blank,), "R": F.texts["assistant"],
    "a": F.texts["analysis"], "c": F.texts["commentary"], "f": F.texts["final"],
}  # fmt: skip
FRAME = "HMDZXLN"

ANY, WRITTEN = "[owRacf]*", "[owRacf]*[oRacf][owRacf]*"
TYPE = f"(?:X{ANY})?M"
ANALYSIS = f"w*Hw*aw*{TYPE}"
BEGIN = "Zw*R"
RECIPIENT = f"(?:w*[oRacf]{ANY}Hw*[acf]{ANY}|w*Hw*[acf]w*[oRacf]{ANY}){TYPE}"
PREAMBLE = f"{BEGIN}w*Hw*cw*{TYPE}(?P<preamble>{ANY})Dw*(?:{BEGIN}{ANALYSIS}{ANY}Dw*)?"
WELL_FORMED = re.compile(
    f"{ANALYSIS}{WRITTEN}Dw*(?P<preambles>(?:{PREAMBLE.replace('?P<preamble>', '?:')})*){BEGIN}"
    f"(?:w*Hw*fw*{TYPE}(?P<answer>{ANY})[ND]|w*Hw*cw*{TYPE}(?P<last>{ANY})N|{RECIPIENT}{ANY}L)"
)
PREAMBLES = re.compile(PREAMBLE)


def well_formed(letters: str) -> bool:
    match = WELL_FORMED.fullmatch(letters)
    if match is None or letters.endswith("L"):
        return match is not None
    said = (match["answer"] or "") + (match["last"] or "")
    said += "".join(preamble["preamble"] for preamble in PREAMBLES.finditer(match["preambles"]))
    return bool(said.strip("w"))


TEXT = st.text("ow", max_size=3)
SAID = TEXT.map("w{}o".format)
CONSTRAINED = st.sampled_from(["M", "wXoM"])
CALLS = st.one_of(
    st.builds("ZRHcwo{}{}L".format, CONSTRAINED, TEXT), st.builds("ZRwoHcw{}{}L".format, CONSTRAINED, TEXT)
)
ANSWERS = st.builds("ZRHf{}{}{}".format, CONSTRAINED, SAID, st.sampled_from("ND"))
PREAMBLE_TEXTS = st.lists(
    st.builds("ZRHcM{}D{}".format, SAID, st.one_of(st.just(""), SAID.map("ZRHaM{}D".format))), max_size=2
).map("".join)
RESPONSES = st.builds("HaM{}D{}{}".format, SAID, PREAMBLE_TEXTS, st.one_of(ANSWERS, CALLS))


def ids_of(letters: str) -> list[int]:
    """Ids of a response; every ordinary token is another, so that nothing repeats."""
    text = iter(F.text)
    return [i for letter in letters for i in (LETTERS.get(letter) or (next(text),))]


def found(letters: str, **options: object) -> set[str]:
    verdict = F.judge(ids_of(letters), **options)
    return {*verdict.reasons, *verdict.flags}


@given(RESPONSES)
def test_any_well_formed_response_is_kept_with_its_mask(letters: str) -> None:
    assert well_formed(letters)
    output = ids_of(letters)
    verdict = F.judge(output)
    assert (verdict.reasons, verdict.flags) == ((), ())
    assert verdict.tool_calls == letters.count("L")
    mask = response_mask(len(F.prompt), len(output), verdict.end)
    assert mask.tolist() == [0] * len(F.prompt) + [1] * len(output)
    assert judge_mask([*F.prompt, *output], mask.tolist(), F.grammar).kept


ALPHABET = "owRacfF" + FRAME
MUTATED = RESPONSES.flatmap(
    lambda letters: st.builds(
        lambda at, stop, put: letters[:at] + put + letters[min(at + stop, len(letters)) :],
        st.integers(0, len(letters)),
        st.integers(0, 2),
        st.text(ALPHABET, max_size=2),
    )
)


@settings(max_examples=300)
@given(st.one_of(MUTATED, RESPONSES.flatmap(st.permutations).map("".join), st.text(ALPHABET, max_size=12)))
def test_a_response_passes_exactly_when_the_grammar_derives_it(letters: str) -> None:
    assert (not found(letters)) == well_formed(letters)


@given(RESPONSES, st.data())
def test_a_cut_anywhere_is_a_truncation_and_nothing_else(letters: str, data: st.DataObject) -> None:
    left = letters[: data.draw(st.integers(1, len(letters) - 1))]
    flags = found(left, finish_reason="length", max_new_tokens=None)
    assert len(flags) == 1
    assert next(iter(flags)).startswith("truncated_in_")
    if "D" not in left:
        assert flags == {"truncated_in_reasoning"}


def dropped(letters: str, index: int) -> set[str]:
    """What a dropped token of the first message's frame, or of the turn's end, must give."""
    if index == len(letters) - 1:
        return {"missing_end", "stop_without_end"}
    return {"no_open"} if index < letters.index("D") else {"no_close"}


@given(RESPONSES, st.data())
def test_a_dropped_token_of_the_boundary_gives_its_reason(letters: str, data: st.DataObject) -> None:
    close = letters.index("D")
    index = data.draw(st.sampled_from([0, 1, 2, close, len(letters) - 1]))
    if letters.endswith("L") and index == len(letters) - 1:
        assert found(letters[:-1]) == {"missing_end", "stop_without_end", "tool_unbalanced"}
    else:
        assert dropped(letters, index) <= found(letters[:index] + letters[index + 1 :])


DOUBLED = {"D": "second_close", "N": "tokens_after_end", "L": "tokens_after_end"}


@given(RESPONSES, st.data())
def test_a_doubled_token_gives_its_reason(letters: str, data: st.DataObject) -> None:
    index = data.draw(st.sampled_from([letters.index("D"), len(letters) - 1]))
    expected = DOUBLED[letters[index]] if index < len(letters) - 1 else "tokens_after_end"
    assert found(letters[: index + 1] + letters[index:]) == {expected}
