"""The made-up conversations: well formed, held out where they must be, the same for the same seed."""

from itertools import islice

import pytest

from make_tiny_verifier.check import fault_of
from make_tiny_verifier.corpus import DATASETS, held_out, training_stream
from make_tiny_verifier.sources import source_conversations, tokenised_conversations
from make_tiny_verifier.train import SEED, sequences


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_turn_is_well_formed(dataset):
    for conversation in held_out(dataset, seed=1, count=40):
        names = {tool["name"] for tool in conversation.tools}
        for index in range(len(conversation.turns)):
            assert fault_of(conversation.completion(index), names) is None


def test_sources_are_disjoint_from_the_training_stream():
    trained = {conversation.asked_first for conversation in islice(training_stream(SEED), 10_000)}
    for dataset in DATASETS:
        asked = [conversation.asked_first for conversation in source_conversations(dataset)]
        assert len(set(asked)) == len(asked)
        assert trained.isdisjoint(asked)


def test_tokenised_files_are_disjoint_from_the_sources_and_each_other():
    sources = {c.asked_first for dataset in DATASETS for c in source_conversations(dataset)}
    first, second = ({c.asked_first for c in tokenised_conversations(series)} for series in ("A1", "A2"))
    assert all(c.is_held_out for c in tokenised_conversations("A1") + tokenised_conversations("A2"))
    assert not (sources & first or sources & second or first & second)


def test_stream_is_the_same_for_the_same_seed():
    assert list(islice(training_stream(1), 50)) == list(islice(training_stream(1), 50))
    assert list(islice(training_stream(1), 50)) != list(islice(training_stream(2), 50))


def test_calls_are_numbered_over_the_conversation():
    conversation = next(c for c in held_out("B8_sweagent", seed=1, count=20) if len(c.turns) == 5)
    results = [m["tool_call_id"] for m in conversation.prompt_messages(4) if m["role"] == "tool"]
    assert results == [f"functions.bash:{i}" for i in range(4)]
    assert conversation.call_id(4) == "functions.bash:4"


def test_weights_are_of_the_completion(tokenizer):
    closing = tokenizer.convert_tokens_to_ids("</think>")
    for sequence in islice(sequences(tokenizer, seed=1), 200):
        assert sequence.ids[-1] == tokenizer.eos_token_id
        assert sequence.weights[-1] == 1
        start = sequence.weights.index(1)
        assert set(sequence.weights[start:]) == {1.0}
        assert all(w == 0 for i, w in zip(sequence.ids[:start], sequence.weights, strict=False) if i == closing)
