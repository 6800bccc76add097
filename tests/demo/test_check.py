"""The judge of a response's form."""

import pytest

from make_tiny_verifier.check import fault_of

SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        ("I think.</think>Yes.<|im_end|>", None),
        ("I think.</think>" + SECTION.format(name="now", arguments="{}") + "<|im_end|>", None),
        ("I think.</think>Yes." + SECTION.format(name="now", arguments='{"a": 1}') + "<|im_end|>", None),
        ("I think.</think>Yes.", "no_end"),
        ("I think.</think>Yes.<|im_end|>More", "no_end"),
        ("I think. Yes.<|im_end|>", "no_think_close"),
        ("I think.</think>Yes.</think>No.<|im_end|>", "stray_special_token"),
        ("<think>I think.</think>Yes.<|im_end|>", "stray_special_token"),
        (" </think>Yes.<|im_end|>", "empty_reasoning"),
        ("I think.</think> <|im_end|>", "empty_answer"),
        ("I think.</think>" + SECTION.format(name="now", arguments="{}") + "More<|im_end|>", "malformed_tool_section"),
        ("I think.</think><|tool_calls_section_begin|>{}<|im_end|>", "malformed_tool_section"),
        ("I think.</think>" + SECTION.format(name="then", arguments="{}") + "<|im_end|>", "unknown_tool"),
        ("I think.</think>" + SECTION.format(name="now", arguments="{a}") + "<|im_end|>", "arguments_not_json"),
        ("I think.</think>" + SECTION.format(name="now", arguments="[1]") + "<|im_end|>", "arguments_not_an_object"),
    ],
)
def test_fault(response: str, fault: str | None):
    assert fault_of(response, {"now"}) == fault
