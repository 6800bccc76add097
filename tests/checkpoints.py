"""Checkpoints without weights, one a model family: tokenizers with the family's special tokens at its published ids.

The vocabulary is sparse (bytes, the special tokens, a few words); templates say what the families' own do for plain
conversations. They are read by the code that reads real checkpoints.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from aerie.settings.profile import load_profile

KIMI = (
    "{% for m in messages %}<|im_{{ 'user' if m.role == 'user' else 'assistant' }}|>{{ m.role }}<|im_middle|>"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}"
TEMPLATES: Mapping[str, str] = {
    "kimi_k2": KIMI + "{% endif %}",
    "kimi_k2_thinking": KIMI + "{% endif %}",
    "kimi_k25": KIMI + "<think>{% if thinking is defined and not thinking %}</think>{% endif %}{% endif %}",
    "qwen3": CHATML + PROMPT + "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "deepseek_r1": DEEPSEEK + PROMPT + "<｜Assistant｜><think>\n{% endif %}",
    "deepseek_v31": DEEPSEEK + PROMPT
    + "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    "deepseek_v3_0324": DEEPSEEK + PROMPT + "<｜Assistant｜>{% endif %}",
    "gpt_oss": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }} {{ reasoning_effort }}<|end|>"
    "{% endfor %}" + PROMPT + "<|start|>assistant{% endif %}",
    "glm_45": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + PROMPT
    + "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}",
    "minimax_m2": "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endfor %}" + PROMPT
    + "]~b]ai\n<think>\n{% endif %}",
    "llama_3": "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}" + PROMPT + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "smollm2": CHATML + PROMPT + "<|im_start|>assistant\n{% endif %}",
}  # fmt: skip

# Special tokens beside those that the profile lists with ids.
MORE_TOKENS: Mapping[str, Mapping[str, int]] = {
    "glm_45": {"[gMASK]": 151331, "<sop>": 151333, "<|system|>": 151335, "<|assistant|>": 151337,
               "<tool_call>": 151352, "</tool_call>": 151353, "<arg_key>": 151356, "</arg_key>": 151357,
               "<arg_value>": 151358, "</arg_value>": 151359},
    "minimax_m2": {"]~b]": 200019},
    "llama_3": {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|start_header_id|>": 128006,
                "<|end_header_id|>": 128007, "<|eom_id|>": 128008, "<|eot_id|>": 128009},
    "smollm2": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
}  # fmt: skip
VOCABULARY_SIZES = {"llama_3": 128_256, "smollm2": 49_152}
SHIPPED = tuple(TEMPLATES)

# DeepSeek's: line breaks belong to the punctuation before them.
DEEPSEEK_SPLIT = r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?\p{L}+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+|\p{N}"
FIRST_BYTE = 2
LINE_BREAK = {"deepseek_r1": 201, "deepseek_v31": 201, "deepseek_v3_0324": 201}
FIRST_WORD_PART = 2000


def special_tokens(name: str) -> dict[str, int]:
    """Special tokens of a family with their ids."""
    profile = load_profile(name)
    tokens = {**profile.expected_ids, **profile.optional_ids, **MORE_TOKENS.get(name, {})}
    if name == "kimi_k2":
        del tokens["<think>"], tokens["</think>"]
    return tokens


def make_checkpoint(
    folder: Path, name: str, *, move: Mapping[str, int] | None = None, config: Mapping[str, Any] | None = None
) -> Path:
    """Write a family's checkpoint: ``move`` gives special tokens other ids, ``config`` changes ``config.json``."""
    profile = load_profile(name)
    tokens = {**special_tokens(name), **(move or {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(name, tokens))
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.save_pretrained(folder)
    described = {
        "model_type": profile.model_types[0],
        "vocab_size": profile.vocabulary_size or VOCABULARY_SIZES[name],
        "eos_token_id": [tokens[token] for token in profile.end_of_turn],
    }
    (folder / "config.json").write_text(json.dumps({**described, **(config or {})}))
    return folder


def _tokenizer(name: str, tokens: Mapping[str, int]) -> Tokenizer:
    line_break = LINE_BREAK.get(name, 198)
    free = iter(i for i in range(3, 300) if i != line_break and i not in (271,))
    vocabulary = {byte: next(free) for byte in sorted(ByteLevel.alphabet()) if byte != "Ċ"}
    vocabulary["Ċ"] = line_break
    merges: list[tuple[str, str]] = []
    for word, word_id in _words(name).items():
        for length in range(2, len(word) + 1):
            merge, merged = (word[: length - 1], word[length - 1]), word[:length]
            if merged not in vocabulary:
                merges.append(merge)
                vocabulary[merged] = word_id if length == len(word) else FIRST_WORD_PART + len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab={**vocabulary, **tokens}, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    if name.startswith("deepseek"):
        split = Split(Regex(DEEPSEEK_SPLIT), "isolated")
        tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_tokens([AddedToken(token, special=not token.startswith("<t"), normalized=False) for token in tokens])
    return tokenizer


def _words(name: str) -> dict[str, int]:
    """Words of several bytes that are one token, at the ids that the profile knows."""
    if name == "gpt_oss":
        return {"assistant": 173781, "analysis": 35644, "comment": 12606, "ary": 815, "final": 17196}
    if name == "qwen3":
        return {"assistant": 77091, "ĊĊ": 271}
    if name == "deepseek_v3_0324":
        return {"</": 1201, "think": 1202, ">Ċ": 1203, ">ĊĊ": 1204, "<think": 1205}
    return {"assistant": 1301, "ĊĊ": 271}
