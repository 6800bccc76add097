import json
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from aerie.errors import BadInput
from aerie.prompts.checkpoint import load_verifier
from aerie.prompts.rendering import Fit, Renderer
from aerie.settings.pipeline import VerifierSettings
from aerie.sources.conversation import Unusable, answer_positions

MESSAGES = [{"role": ("user", "assistant")[i % 2], "content": f"Add {i} and 5 to it."} for i in range(21)]


def renderer(checkpoint: Path, prompt_date: date | None = None) -> Renderer:
    return Renderer(load_verifier(VerifierSettings(path=checkpoint, profile="demo")), prompt_date)


def test_long_conversations_do_not_pile_up_at_the_limit_but_are_cut_at_any_turn_that_fits(checkpoint: Path) -> None:
    here = renderer(checkpoint)
    positions = answer_positions(MESSAGES)
    lengths = [len(here.render(MESSAGES[:position], ())) for position in positions]
    fit = Fit(lengths[5], "one", seed=1)

    def fitted(conversation_id: str) -> int:
        rendered = fit.render(here, MESSAGES, (), conversation_id=conversation_id)
        assert rendered.history == MESSAGES[: positions[rendered.turn]], "whole turns only"
        assert len(rendered.prompt_ids) == lengths[rendered.turn]
        return rendered.turn

    turns = Counter(fitted(f"conversation-{i}") for i in range(120))

    assert set(turns) == set(range(6))
    assert turns[5] < 60


@pytest.mark.parametrize(("turns", "turn"), [("last", 5), ("first", None), ("every", None)])
def test_a_history_that_is_too_long_is_cut_only_where_the_settings_leave_a_choice(
    checkpoint: Path, turns: Any, turn: int | None
) -> None:
    here = renderer(checkpoint)
    limit = len(here.render(MESSAGES[: answer_positions(MESSAGES)[5]], ()))
    fit = Fit(limit, turns, seed=1)

    if turn is None:
        with pytest.raises(Unusable, match="prompt_too_long"):
            fit.render(here, MESSAGES, (), conversation_id="x")
    else:
        assert fit.render(here, MESSAGES, (), conversation_id="x").turn == turn


def test_a_first_turn_that_does_not_fit_is_too_long(checkpoint: Path) -> None:
    with pytest.raises(Unusable) as refused:
        Fit(5, "one", seed=1).render(renderer(checkpoint), MESSAGES, (), conversation_id="x")

    assert refused.value.reason == "prompt_too_long"


WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}
ARGUMENTS = {"town": "Köln", "days": [1, 2]}
CALLED = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "functions.weather:0",
                "type": "function",
                "function": {"name": "weather", "arguments": ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "functions.weather:0", "content": "dry"},
]
# How the families write the arguments of a call: Kimi and Qwen3, Llama, DeepSeek, GLM and MiniMax.
BY_FAMILY = {
    "either": "{{ arguments if arguments is string else arguments | tojson }}",
    "object": "{{ arguments | tojson }}",
    "text": "{{ '' + arguments }}",
    "pairs": "{% for k, v in arguments.items() %}{{ k }}={{ v if v is string else v | tojson }};{% endfor %}",
    "python": "{{ arguments }}",
}


@pytest.mark.parametrize("family", BY_FAMILY)
def test_arguments_of_calls_come_in_the_form_that_the_template_takes(checkpoint: Path, family: str) -> None:
    template = checkpoint / "chat_template.jinja"
    theirs = template.read_text()
    written = "{{- arguments if arguments is string else arguments | tojson -}}"
    assert written in theirs
    template.write_text(theirs.replace(written, BY_FAMILY[family]))
    here = renderer(checkpoint)

    text = here.verifier.tokenizer.decode(here.render(CALLED, [WEATHER]))

    said = text.partition("<|tool_call_argument_begin|>")[2].partition("<|tool_call_end|>")[0]
    if family == "pairs":
        assert said.strip() == "town=Köln;days=[1, 2];"
    else:
        assert json.loads(said) == ARGUMENTS


def test_tools_that_the_template_does_not_render_are_never_dropped_in_silence(checkpoint: Path) -> None:
    """A plain chat template ignores tools: the prompt would ask for what it never shows."""
    template = checkpoint / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "<|im_assistant|>assistant<|im_middle|><think>{% if thinking is false %}</think>{% endif %}"
    )
    here = renderer(checkpoint)

    assert here.render(CALLED[:1], ())
    for history, tools in ((CALLED[:1], [WEATHER]), (CALLED, [])):
        with pytest.raises(Unusable) as refused:
            here.render(history, tools)
        assert refused.value.reason == "template_without_tools"


def test_a_template_that_writes_todays_date_gets_the_day_of_the_settings(checkpoint: Path) -> None:
    template = checkpoint / "chat_template.jinja"
    template.write_text("{{ 'Today is ' ~ strftime_now('%d %b %Y') ~ '.' }}" + template.read_text())

    with pytest.raises(BadInput, match=r"verifier\.prompt_date"):
        renderer(checkpoint)

    here = renderer(checkpoint, date(2025, 3, 9))
    assert here.verifier.tokenizer.decode(here.render(CALLED[:1], ())).startswith("Today is 09 Mar 2025.")
