"""The two shipped families as the tests use them: real ids, and a few ordinary and white-space ones."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aerie.boundary import Grammar, Verdict, compile_grammar, judge
from aerie.settings.profile import load_profile

# A user's turn and the assistant's header; "text" stands for an ordinary token.
HEADER = (
    "<|im_user|>",
    "text",
    "<|im_middle|>",
    "text",
    "text",
    "<|im_end|>",
    "<|im_assistant|>",
    "text",
    "<|im_middle|>",
)
TINY_VERIFIER = Path(__file__).parents[2] / "demo" / "tiny_verifier"


@dataclass(frozen=True)
class Family:
    """Ids of one family by role; ``text`` are ordinary ids, ``blank`` is a white-space one."""

    grammar: Grammar
    header: tuple[int, ...]
    foreign: int
    open: int
    close: int
    section_begin: int
    section_end: int
    call_begin: int
    argument_begin: int
    call_end: int
    end: int
    text: tuple[int, ...] = tuple(range(300, 700))
    blank: int = 200

    @property
    def prompt(self) -> list[int]:
        """A prompt that leaves reasoning open."""
        return [*self.header, self.open]

    @property
    def prompt_off(self) -> list[int]:
        """A prompt with thinking off."""
        return [*self.header, self.open, self.close]

    def call(self, index: int = 0, arguments: tuple[int, ...] = (310, 311)) -> list[int]:
        """One tool call."""
        return [self.call_begin, 320 + index, self.argument_begin, *arguments, self.call_end]

    def section(self, *calls: list[int]) -> list[int]:
        """A tool section."""
        return [self.section_begin, *(i for call in calls for i in call), self.section_end]

    def judge(self, output: list[int], *, prompt: list[int] | None = None, **options: Any) -> Verdict:
        """Judge a response that the server ended by itself below the cap, unless ``options`` say otherwise."""
        known = {"finish_reason": "stop", "completion_tokens": len(output), "max_new_tokens": 8192}
        return judge(self.prompt if prompt is None else prompt, output, grammar=self.grammar, **{**known, **options})


def _family(name: str, ids: dict[str, int], vocabulary_size: int) -> Family:
    profile = load_profile(name)
    return Family(
        grammar=compile_grammar(profile, ids, vocabulary_size, whitespace_ids=(200,)),
        header=tuple(ids.get(token, 401) for token in HEADER),
        foreign=ids["<|im_user|>"],
        open=ids["<think>"],
        close=ids["</think>"],
        section_begin=ids["<|tool_calls_section_begin|>"],
        section_end=ids["<|tool_calls_section_end|>"],
        call_begin=ids["<|tool_call_begin|>"],
        argument_begin=ids["<|tool_call_argument_begin|>"],
        call_end=ids["<|tool_call_end|>"],
        end=ids["<|im_end|>"],
    )


@cache
def family(name: str) -> Family:
    """A shipped family; ids of the demo come from its checkpoint, those of Kimi from the published tokenizer."""
    if name == "kimi_k25":
        return _family(name, dict(load_profile(name).expected_ids), 163_840)
    tokenizer = json.loads((TINY_VERIFIER / "tokenizer.json").read_text(encoding="utf-8"))
    return _family(name, {token["content"]: token["id"] for token in tokenizer["added_tokens"]}, 1024)
