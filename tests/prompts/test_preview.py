import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aerie.prompts.preview import SHOWN_CHARACTERS, preview
from aerie.settings.pipeline import PipelineSettings

from .conftest import write_lines


@pytest.fixture
def shown(tmp_path: Path, settings_for: Callable[..., PipelineSettings]) -> Callable[..., str]:
    """The preview of rows as a terminal gets it, with or without colours."""

    def make(rows: list[Any], *, colours: bool = False, key: str = "C1_mine", **dataset: Any) -> str:
        source = {"reader": "generic", "licence": "MIT", "path": write_lines(tmp_path / "rows.jsonl", rows)}
        settings = settings_for({key: {"source": source | dataset.pop("source", {}), **dataset}})
        output = io.StringIO()
        console = Console(
            file=output, force_terminal=colours, soft_wrap=True, highlight=False, markup=False, emoji=False
        )
        for line in preview(settings, key, 5):
            console.print(line)
        return output.getvalue()

    return make


def test_a_row_is_shown_as_it_stands_and_as_the_verifier_will_see_it(shown: Callable[..., str]) -> None:
    text = shown([{"id": "a", "prompt": "Add 1 and 2."}])

    assert "rows.jsonl:1" in text
    assert "prompt: Add 1 and 2." in text
    assert "<|im_user|>user<|im_middle|>Add 1 and 2.<|im_end|><|im_assistant|>assistant<|im_middle|><think>" in text


def test_special_tokens_are_coloured_and_nothing_else_is_in_their_colour(shown: Callable[..., str]) -> None:
    text = shown([{"prompt": "Add 1 and 2."}], colours=True)

    assert "\x1b[1;35m<|im_user|>\x1b[0muser\x1b[1;35m<|im_middle|>\x1b[0mAdd 1 and 2.\x1b[1;35m<|im_end|>" in text


@pytest.mark.parametrize("where", ["prompt", "note\x1b[2J"])
def test_a_row_can_neither_move_the_terminal_nor_speak_markup(shown: Callable[..., str], where: str) -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202egnp\u200b [red]loud[/red] :smile: &"
    row = {"prompt": "Add 1 and 2.", where: hostile}

    text = shown([row])

    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "<U+001B>]0;title<U+0007><U+001B>[2J<U+000D><U+009B>31m<U+202E>gnp<U+200B> [red]loud[/red] :smile: &" in text
    assert all(c in "\n\t" or c.isprintable() or c == "\x1b" for c in shown([row], colours=True))


@pytest.mark.parametrize(
    ("row", "fields", "line"),
    [
        ({"text": "a"}, {}, "--- skipped: missing_field: "),
        ({"prompt": "<|im_end|>"}, {}, "--- skipped: control_token_in_text: "),
        ({"prompt": "very " * 300}, {}, "--- skipped: prompt_too_long: "),
        ({"prompt": "a", "lang": "de"}, {"source": {"where": {"lang": "en"}}}, "--- set aside: filtered: lang is 'de'"),
        ({"prompt": "half a pair \ud800"}, {}, "--- skipped: "),
    ],
)
def test_what_would_not_become_a_prompt_says_why(
    shown: Callable[..., str], row: dict[str, Any], fields: dict[str, Any], line: str
) -> None:
    assert line in shown([row], **fields)


def test_every_prompt_of_a_row_is_shown_where_every_turn_becomes_one(shown: Callable[..., str]) -> None:
    messages = [{"role": role, "content": "Add."} for role in ("user", "assistant", "user")]

    text = shown([{"messages": messages}], source={"turns": "every"})

    assert [line.split(",")[1] for line in text.splitlines() if line.startswith("--- prompt")] == [" turn 0", " turn 1"]


def test_of_long_values_the_middle_is_left_out(shown: Callable[..., str]) -> None:
    text = shown([{"prompt": "Add 1.", "other": "x" * (SHOWN_CHARACTERS + 500)}])

    assert " ... 500 characters left out ... " in text


def test_rows_that_arrive_tokenised_are_decoded_with_what_is_trained_in_colour(shown: Callable[..., str]) -> None:
    row = {"input_ids": [1013, 363, 62, 547, 1014], "loss_mask": [0, 0, 0, 1, 1]}

    text = shown([row], key="A1", kind="tokenised", source={"reader": "tokenised"}, colours=True)

    assert "row of 5 tokens, 2 trained" in text
    assert "\x1b[32m" in text
    assert json.dumps(row["input_ids"]) in text
