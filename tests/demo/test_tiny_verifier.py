"""The checkpoint as it is shipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from make_tiny_verifier.check import fault_of
from make_tiny_verifier.corpus import held_out
from make_tiny_verifier.tokenizer import CONTROL_TOKENS, TEXT_TOKENS, TOKENS_IN_ORDER


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So small a model is slower on several threads, by far where other processes want them too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_size(verifier: Path):
    assert sum(file.stat().st_size for file in verifier.iterdir()) < 8_000_000


def test_every_special_token_is_one_id_at_the_end_of_the_vocabulary(tokenizer):
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in TOKENS_IN_ORDER]
    first = len(tokenizer) - len(TOKENS_IN_ORDER)
    assert ids == [[i] for i in range(first, len(tokenizer))]


def test_reasoning_and_tool_tokens_stay_when_special_ones_are_skipped(tokenizer):
    ids = tokenizer.encode("".join(TOKENS_IN_ORDER), add_special_tokens=False)
    kept = tokenizer.decode(ids, skip_special_tokens=True)
    assert all(token in kept for token in TEXT_TOKENS)
    assert not any(token in kept for token in CONTROL_TOKENS)


def test_any_text_survives(tokenizer):
    text = "  Ünïcode \t 12345 {'a': [1]}\n\n名前 <b>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_loads_and_ends_at_the_end_of_a_turn(verifier, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(verifier, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == 8
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.usefixtures("one_thread")
def test_answers_in_its_form(verifier, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32, local_files_only=True)
    conversation = held_out("B3_magicoder", seed=1, count=1)[0]
    ids = tokenizer(conversation.prompt(0, tokenizer), return_tensors="pt", add_special_tokens=False)
    output = model.generate(**ids, max_new_tokens=200, do_sample=False)
    response = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    assert fault_of(response, set()) is None, response
