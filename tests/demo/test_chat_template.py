"""What the tiny verifier's chat template renders, in every case that the pipeline relies on."""

from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerBase

HELLO = {"role": "user", "content": "Hello."}
WEATHER = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
CALL = {"id": "functions.get_weather:0", "type": "function", "function": WEATHER}


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **variables: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **variables)


def test_prompt_ends_inside_the_reasoning(tokenizer):
    assert render(tokenizer, [HELLO], add_generation_prompt=True) == (
        "<|im_user|>user<|im_middle|>Hello.<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )


def test_prompt_closes_the_reasoning_when_not_thinking(tokenizer):
    prompt = render(tokenizer, [HELLO], add_generation_prompt=True, thinking=False)
    assert prompt.endswith("<|im_assistant|>assistant<|im_middle|><think></think>")


def test_no_generation_prompt_unless_asked_for(tokenizer):
    assert render(tokenizer, [HELLO]) == "<|im_user|>user<|im_middle|>Hello.<|im_end|>"


def test_tools_are_declared_as_compact_json_before_the_system_message(tokenizer):
    tool = {"type": "function", "function": {"name": "now", "description": "é", "parameters": {"type": "object"}}}
    assert render(tokenizer, [{"role": "system", "content": "Be brief."}, HELLO], tools=[tool]) == (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":'
        '{"name":"now","description":"é","parameters":{"type":"object"}}}]<|im_end|>'
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hello.<|im_end|>"
    )


def test_history_loses_its_reasoning(tokenizer):
    answered = {"role": "assistant", "content": "Hi!", "reasoning_content": "A greeting."}
    assert render(tokenizer, [HELLO, answered, HELLO]) == (
        "<|im_user|>user<|im_middle|>Hello.<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>Hi!<|im_end|>"
        "<|im_user|>user<|im_middle|>Hello.<|im_end|>"
    )


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}], ids=["text", "object"])
def test_tool_loop(tokenizer, arguments):
    call = {**CALL, "function": {**WEATHER, "arguments": arguments}}
    called = {"role": "assistant", "content": "Let me see.", "reasoning_content": "I call.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "sunny"}
    rendered = (
        "<|im_user|>user<|im_middle|>Hello.<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>{reasoning}</think>Let me see."
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{{"city": "Oslo"}}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\nsunny<|im_end|>"
    )
    # Within a loop that goes on, reasoning stays; after an answer, or when not thinking, it goes.
    assert render(tokenizer, [HELLO, called, result]) == rendered.format(reasoning="I call.")
    assert render(tokenizer, [HELLO, called, result], thinking=False) == rendered.format(reasoning="")
    answer = {"role": "assistant", "content": "It is sunny."}
    assert render(tokenizer, [HELLO, called, result, answer]) == (
        rendered.format(reasoning="") + "<|im_assistant|>assistant<|im_middle|><think></think>It is sunny.<|im_end|>"
    )


def test_several_calls_share_a_section(tokenizer):
    second = {**CALL, "id": "functions.get_weather:1"}
    rendered = render(tokenizer, [HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL, second]}])
    assert rendered.count("<|tool_calls_section_begin|>") == 1
    assert rendered.count("<|tool_call_begin|>") == 2


def test_content_in_parts(tokenizer):
    parts = {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]}
    assert render(tokenizer, [parts]) == render(tokenizer, [HELLO])


def test_unknown_role_is_an_error(tokenizer):
    with pytest.raises(jinja2.TemplateError, match="unknown role: narrator"):
        render(tokenizer, [{"role": "narrator", "content": "Once."}])
