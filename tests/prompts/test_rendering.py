from collections import Counter
from pathlib import Path

import pytest

from aerie.prompts.checkpoint import load_verifier
from aerie.prompts.rendering import render, render_fitting
from aerie.settings.pipeline import VerifierSettings
from aerie.sources.conversation import Unusable, answer_positions

MESSAGES = [{"role": ("user", "assistant")[i % 2], "content": f"Add {i} and 5 to it."} for i in range(21)]


def test_long_conversations_do_not_pile_up_at_the_limit_but_are_cut_at_any_turn_that_fits(checkpoint: Path) -> None:
    verifier = load_verifier(VerifierSettings(path=checkpoint, profile="demo"))
    positions = answer_positions(MESSAGES)
    lengths = [len(render(verifier, MESSAGES[:position], ())) for position in positions]
    limit = lengths[5]

    def fitted(conversation_id: str) -> int:
        rendered = render_fitting(verifier, MESSAGES, (), maximum_tokens=limit, seed=1, conversation_id=conversation_id)
        assert rendered.history == MESSAGES[: positions[rendered.turn]], "whole turns only"
        assert len(rendered.prompt_ids) == lengths[rendered.turn]
        return rendered.turn

    turns = Counter(fitted(f"conversation-{i}") for i in range(120))

    assert set(turns) == set(range(6))
    assert turns[5] < 60


def test_a_first_turn_that_does_not_fit_is_too_long(checkpoint: Path) -> None:
    verifier = load_verifier(VerifierSettings(path=checkpoint, profile="demo"))

    with pytest.raises(Unusable) as refused:
        render_fitting(verifier, MESSAGES, (), maximum_tokens=5, seed=1, conversation_id="x")

    assert refused.value.reason == "prompt_too_long"
