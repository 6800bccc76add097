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


@pytest.mark.parametrize("f", ["demo", "kimi_k25"], indirect=True)
def test_call_cut_by_the_cap_is_not_held_against_its_half_arguments(f: Family) -> None:
    output = [500, f.close, f.section_begin, f.call_begin, 300, f.argument_begin, 301]
    verdict = f.judge(output, finish_reason="length")
    checked = check_tool_calls(verdict, output, decode=lambda ids: "{", tools={}, grammar=f.grammar)
    assert checked.flags == ("truncated_in_tool_call",)


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>"
)
FENCED = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
AS_WRITTEN = {
    "demo": "Hm.</think>" + KIMI,
    "kimi_k2": KIMI,
    "kimi_k2_thinking": "<think>Hm.</think>" + KIMI,
    "kimi_k25": "Hm.</think>" + KIMI,
    "qwen3": '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call><|im_end|>',
    "deepseek_r1": "Hm.</think>" + FENCED,
    "deepseek_v3_0324": "Hm.</think>" + FENCED,
    "deepseek_v31": "Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.NAME "
    "<|constrain|>json<|message|>JSON<|call|>",
}
"""Responses as their families write them; NAME and JSON are the tool's and the arguments."""

PAIRS = "\n<think>Hm.</think>\n<tool_call>NAME\nARGUMENTS</tool_call><|observation|>"
INVOKE = (
    'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
    '</invoke>\n<invoke name="NAME">\nARGUMENTS</invoke>\n</minimax:tool_call>[e~['
)


def judged_text(f: Family, text: str) -> Verdict:
    output = f.tokenizer.encode(text, add_special_tokens=False)
    return check_tool_calls(
        f.judge(output),
        output,
        decode=f.tokenizer.decode,
        tools=declared_tools(json.dumps([WEATHER])),
        grammar=f.grammar,
    )


def said(f: Family, text: str, name: str, arguments: str) -> tuple[str, ...]:
    verdict = judged_text(f, text.replace("NAME", name).replace("JSON", arguments).replace("ARGUMENTS", arguments))
    assert (verdict.reasons, verdict.tool_calls) == ((), 1)
    return verdict.flags


@pytest.mark.parametrize("f", AS_WRITTEN, indirect=True)
def test_a_call_reads_as_its_family_writes_it(f: Family) -> None:
    text = AS_WRITTEN[f.name]
    assert said(f, text, "get_weather", '{"city": "Oslo", "days": 3}') == ()
    assert said(f, text, "get_wether", '{"city": "Oslo"}') == ("tool_name_unknown",)
    assert said(f, text, "get_weather", '{"city": "Oslo"') == ("tool_arguments_not_json",)
    assert said(f, text, "get_weather", '{"days": 3}') == ("tool_arguments_schema",)


def test_a_call_without_a_name_or_arguments_is_flagged_where_both_are_in_one_object() -> None:
    f = family("qwen3")
    text = "<think>Hm.</think><tool_call>{}</tool_call><|im_end|>"
    assert judged_text(f, text.format('{"arguments": {}}')).flags == ("tool_id_malformed",)
    assert judged_text(f, text.format('{"name": "get_weather"}')).flags == ("tool_arguments_not_json",)
    assert judged_text(f, text.format("[1]")).flags == ("tool_id_malformed", "tool_arguments_not_json")


def glm(**values: object) -> str:
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())


def minimax(**values: object) -> str:
    return "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())


@pytest.mark.parametrize(
    ("f", "text", "written"), [("glm_45", PAIRS, glm), ("minimax_m2", INVOKE, minimax)], indirect=["f"]
)
def test_values_without_quotes_have_the_types_that_the_tool_declares(f: Family, text: str, written) -> None:  # type: ignore[no-untyped-def]
    assert said(f, text, "get_weather", written(city="Oslo", days=3)) == ()
    assert said(f, text, "get_weather", written(city=7)) == ()
    assert said(f, text, "get_wether", written(city="Oslo")) == ("tool_name_unknown",)
    assert said(f, text, "get_weather", written(city="Oslo", days="three")) == ("tool_arguments_schema",)
    assert said(f, text, "get_weather", written(days=3)) == ("tool_arguments_schema",)


def test_text_among_the_elements_of_a_section_is_a_malformed_call() -> None:
    f = family("minimax_m2")
    text = "Hm.</think><minimax:tool_call>{}</minimax:tool_call>[e~["
    for inside in ("", "get_weather()", '<invoke name="get_weather">'):
        assert "tool_id_malformed" in judged_text(f, text.format(inside)).flags


def test_tools_that_are_no_declarations_are_refused() -> None:
    with pytest.raises(BadInput, match="expected a JSON list of tool declarations"):
        declared_tools('[{"title": "no name"}]')
