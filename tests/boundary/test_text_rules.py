import json

import pytest

from aerie.boundary import Verdict
from aerie.boundary.text_rules import check_tool_calls, declared_tools
from aerie.errors import BadInput

from .families import Family, family

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
F = family("kimi_k25")


def judged(*calls: tuple[str, str], tools: str | None = json.dumps([WEATHER]), known: bool = True) -> Verdict:
    """Verdict on a response that makes these calls, each an id and arguments as text."""
    texts: dict[int, str] = {}
    tokens: list[list[int]] = []
    for call_id, arguments in calls:
        first = 300 + len(texts)
        texts |= {first: call_id, first + 1: arguments}
        tokens.append([F.call_begin, first, F.argument_begin, first + 1, F.call_end])
    output = [500, F.close, *F.section(*tokens), F.end]
    return check_tool_calls(
        F.judge(output),
        output,
        decode=lambda ids: "".join(texts[i] for i in ids),
        tools=declared_tools(tools) if known else None,
        grammar=F.grammar,
    )


def test_call_of_a_declared_tool_with_fitting_arguments_passes_and_nothing_is_left_unchecked() -> None:
    verdict = judged(("functions.get_weather:0", ' {"city": "Oslo", "days": 3}'))
    assert (verdict.verdict, verdict.flags, verdict.unchecked) == ("kept", (), ())


@pytest.mark.parametrize(
    ("call_id", "arguments", "flag"),
    [
        ("functions.get_weather:0", '{"city": "Oslo"', "tool_arguments_not_json"),
        ("functions.get_weather:0", "", "tool_arguments_not_json"),
        ("functions.get_weather:0", '{"days": NaN, "city": ""}', "tool_arguments_not_json"),
        ("functions.get_weather:0", "[" * 100_000, "tool_arguments_not_json"),
        ("functions.get_weather:0", '{"days": 3}', "tool_arguments_schema"),
        ("functions.get_weather:0", '{"city": 3}', "tool_arguments_schema"),
        ("functions.get_weather:0", '"Oslo"', "tool_arguments_schema"),
        ("functions.get_wether:0", '{"city": "Oslo"}', "tool_name_unknown"),
        ("functions_get_weather_0", '{"city": "Oslo"}', "tool_id_malformed"),
        ("call_8fd1", '{"city": "Oslo"}', "tool_id_malformed"),
        ("", '{"city": "Oslo"}', "tool_id_malformed"),
    ],
)
def test_faulty_call_is_flagged_kept_and_located(call_id: str, arguments: str, flag: str) -> None:
    verdict = judged(("functions.get_weather:0", '{"city": "Oslo"}'), (call_id, arguments))
    assert (verdict.verdict, verdict.reasons, verdict.flags) == ("kept", (), (flag,))
    # The second call's own tokens, not the first's.
    assert len(verdict.positions[flag]) == 1
    assert verdict.positions[flag][0] > 7


def test_prompt_that_declares_no_tool_makes_every_name_unknown() -> None:
    assert judged(("functions.get_weather:0", "{}"), tools=None).flags == ("tool_name_unknown",)


def test_unknown_declarations_leave_their_rules_unchecked_never_passed() -> None:
    verdict = judged(("functions.get_weather:0", "{"), known=False)
    assert verdict.flags == ("tool_arguments_not_json",)
    assert verdict.unchecked == ("tool_name_unknown", "tool_arguments_schema")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "dict"},
        {"type": "object", "properties": {"city": {"pattern": "("}}},
        {"$ref": "https://example.invalid/schema.json"},
        {"$ref": "#"},
    ],
)
def test_declaration_that_is_no_schema_leaves_arguments_unchecked(parameters: dict[str, object]) -> None:
    tools = json.dumps([{"name": "get_weather", "parameters": parameters}])
    verdict = judged(("functions.get_weather:0", '{"city": "Oslo"}'), tools=tools)
    assert (verdict.flags, verdict.unchecked) == ((), ("tool_arguments_schema",))


def test_call_cut_by_the_cap_is_not_held_against_its_half_arguments(f: Family) -> None:
    output = [500, f.close, f.section_begin, f.call_begin, 300, f.argument_begin, 301]
    verdict = f.judge(output, finish_reason="length")
    checked = check_tool_calls(verdict, output, decode=lambda ids: "{", tools={}, grammar=f.grammar)
    assert checked.flags == ("truncated_in_tool_call",)


def test_tools_that_are_no_declarations_are_refused() -> None:
    with pytest.raises(BadInput, match="expected a JSON list of tool declarations"):
        declared_tools('[{"title": "no name"}]')
