"""The tokenizer: byte-level BPE over the corpus, with Kimi-K2's special tokens after the words, as Kimi has them."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from make_tiny_verifier.corpus import training_stream
from make_tiny_verifier.files import replaced_directory

VOCABULARY = 1024
SAMPLES = 8000
SEED = 7

CONTROL_TOKENS = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[PAD]",
    "[UNK]",
]
NAMED_TOKENS = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "pad_token": "[PAD]", "unk_token": "[UNK]"}
TEXT_TOKENS = [
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
"""Single tokens that stay in decoded text when special ones are skipped: Kimi declares them `special: false`."""

TOKENS_IN_ORDER = [*CONTROL_TOKENS[:7], *TEXT_TOKENS, *CONTROL_TOKENS[7:]]


def _fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **NAMED_TOKENS,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def _plain_text(samples: int) -> Iterator[str]:
    """The corpus as the chat template renders it, cut at the special tokens."""
    renderer = _fast(Tokenizer(models.BPE()))
    special = re.compile("|".join(map(re.escape, TOKENS_IN_ORDER)))
    for conversation in islice(training_stream(SEED), samples):
        last = len(conversation.turns) - 1
        text = conversation.prompt(last, renderer) + conversation.completion(last)
        yield from filter(None, special.split(text))


def make_tokenizer(out: Path) -> None:
    """Trains the tokenizer and writes its files to the directory `out`.

    Raises ValueError if the corpus has too few different words for the vocabulary.
    """
    words = VOCABULARY - len(TOKENS_IN_ORDER)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    core.train_from_iterator(_plain_text(SAMPLES), trainer)
    if core.get_vocab_size() != words:
        raise ValueError(f"the corpus yields {core.get_vocab_size()} words, not {words}")
    core.add_tokens([AddedToken(t, special=t in CONTROL_TOKENS, normalized=False) for t in TOKENS_IN_ORDER])
    with replaced_directory(out) as directory:
        _fast(core).save_pretrained(directory)
