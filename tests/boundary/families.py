"""The shipped families as the tests use them: loaded as a checkpoint is, with the parts of a response by role."""

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from aerie.boundary import Grammar, Verdict, compile_grammar, judge
from aerie.prompts.checkpoint import load_verifier
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.profile import Profile, load_profile

from ..checkpoints import SHIPPED, make_checkpoint

ALL = ("demo", *SHIPPED)
TINY_VERIFIER = Path(__file__).parents[2] / "demo" / "tiny_verifier"
FOREIGN = {
    "demo": "<|im_user|>", "kimi_k2": "<|im_user|>", "kimi_k2_thinking": "<|im_user|>", "kimi_k25": "<|im_user|>",
    "qwen3": "<tool_response>", "deepseek_r1": "<｜User｜>", "deepseek_v31": "<｜User｜>",
    "deepseek_v3_0324": "<｜User｜>", "gpt_oss": "<|startoftext|>", "glm_45": "<|system|>", "minimax_m2": "]~b]",
    "llama_3": "<|start_header_id|>", "smollm2": "<|im_start|>",
}  # fmt: skip
"""A special token that a response may not hold."""

# In a message's header, ordinary tokens: a recipient, and the type of a call's arguments.
RECIPIENT, ARGUMENT_TYPE = 390, 391


@dataclass(frozen=True)
class Family:
    """One family; its ids by role, -1 where it has none.

    ``prompt`` leaves reasoning as the family's prompts do (DeepSeek-V3-0324: open, though it need not). ``opening`` is
    what a response begins with before its reasoning, ``closing`` what stands between that and the answer.
    """

    name: str
    profile: Profile
    grammar: Grammar
    ids: dict[str, int]
    texts: dict[str, tuple[int, ...]]
    tokenizer: Any
    header: tuple[int, ...]
    prompt: list[int]
    prompt_off: list[int]
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    text: tuple[int, ...] = tuple(range(300, 700))
    blank: int = -1

    @property
    def thinks(self) -> bool:
        """Whether ``prompt`` or the response opens reasoning."""
        return bool(self.closing)

    @property
    def foreign(self) -> int:
        """A special token that a response may not hold."""
        return self.ids[FOREIGN[self.name]]

    @property
    def end(self) -> int:
        """The end of turn."""
        return self.ids[self.profile.end_of_turn[0]]

    @property
    def open(self) -> int:
        """The opening tag."""
        return self.id_of(self.profile.reasoning.open)

    @property
    def close(self) -> int:
        """The closing tag."""
        return self.id_of(self.profile.reasoning.close)

    def __getattr__(self, role: str) -> int:
        """A tool's token, by its name in the profile."""
        if role.startswith("_"):
            raise AttributeError(role)
        tools, channels = self.profile.tools, self.profile.channels
        for group in (tools, tools and tools.pairs, channels):
            if group is not None and role in type(group).model_fields:
                return self.id_of(getattr(group, role))
        return -1

    def id_of(self, token: Any) -> int:
        """Id of a token of the profile, -1 where it is none."""
        return self.ids[token] if isinstance(token, str) else -1

    def think(self, reasoning: list[int]) -> list[int]:
        """Reasoning up to its end: nothing in a family that does not reason."""
        return [*self.opening, *reasoning] if self.thinks else []

    def said(self, reasoning: list[int], answer: list[int]) -> list[int]:
        """A whole response."""
        return [*self.think(reasoning), *self.closing, *answer, self.end]

    def call(self, index: int = 0, arguments: tuple[int, ...] = (310, 311)) -> list[int]:
        """One tool call."""
        if self.profile.channels:
            name = [*self.texts["commentary"], RECIPIENT + 2 + index]
            return [self.channel, *name, self.constrain, ARGUMENT_TYPE, self.message, *arguments, self.ids["<|call|>"]]
        if self.profile.tools and self.profile.tools.pairs:
            pair = [self.key_begin, 330 + index, self.key_end, self.value_begin, *arguments, self.value_end]
            return [self.call_begin, 320 + index, *pair, self.call_end]
        if self.argument_begin < 0:
            return [self.call_begin, 320 + index, *arguments, self.call_end]
        return [self.call_begin, 320 + index, self.argument_begin, *arguments, self.call_end]

    def section(self, *calls: list[int]) -> list[int]:
        """A tool section, or calls one by one where the family has none."""
        inside = list(chain.from_iterable(calls))
        return [self.section_begin, *inside, self.section_end] if self.section_begin >= 0 else inside

    def called(self, reasoning: list[int], *calls: list[int]) -> list[int]:
        """A whole response without an answer but with tool calls."""
        if self.profile.channels:
            frame = self.closing[: self.closing.index(self.channel)]
            return [*self.think(reasoning), *frame, *calls[0]]
        return [*self.think(reasoning), *self.closing, *self.section(*calls), self.end]

    def judge(self, output: list[int], *, prompt: list[int] | None = None, **options: Any) -> Verdict:
        """Judge a response that the server ended by itself below the cap, unless ``options`` say otherwise."""
        known = {"finish_reason": "stop", "completion_tokens": len(output), "max_new_tokens": 8192}
        return judge(self.prompt if prompt is None else prompt, output, grammar=self.grammar, **{**known, **options})


@cache
def family(name: str) -> Family:
    """A shipped family, loaded by the code that loads real checkpoints."""
    folder = Path(tempfile.mkdtemp(prefix="aerie-test-family-"))
    try:
        if name == "demo":
            for part in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(TINY_VERIFIER / part, folder / part)
            config = {"model_type": "llama", "vocab_size": 1024, "eos_token_id": 1010}
            (folder / "config.json").write_text(json.dumps(config))
        else:
            make_checkpoint(folder, name)
        return _family(folder, load_profile(name))
    finally:
        shutil.rmtree(folder)


def _family(folder: Path, profile: Profile) -> Family:
    verifier = load_verifier(VerifierSettings(path=folder, profile=profile.name))
    tokens = verifier.tokens
    blank = tokens.whitespace_ids[0]
    grammar = compile_grammar(
        profile, tokens.token_ids, tokens.vocabulary_size, whitespace_ids=(blank,), text_ids=tokens.text_ids
    )
    prompt = _rendered(verifier, **verifier.switches)
    off = {**verifier.switches, profile.thinking_switch: False} if profile.thinking_switch else None
    prompt_off = _rendered(verifier, **off) if off else []
    made = Family(
        name=profile.name,
        profile=profile,
        grammar=grammar,
        ids=dict(tokens.token_ids),
        texts=dict(tokens.text_ids),
        tokenizer=verifier.tokenizer,
        header=tuple(prompt),
        prompt=prompt,
        prompt_off=prompt_off,
        blank=blank,
    )
    return _with_reasoning(made)


def _rendered(verifier: Any, **switches: Any) -> list[int]:
    messages = [{"role": "user", "content": "Hi there"}]
    text = verifier.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switches)
    return list(verifier.tokenizer.encode(text, add_special_tokens=False))


def _with_reasoning(f: Family) -> Family:
    """Say where reasoning opens and closes."""
    reasoning = f.profile.reasoning
    if f.profile.channels:
        role, names = f.texts["assistant"], f.texts
        opening = (f.channel, *names["analysis"], f.message)
        return replace(
            f,
            opening=opening,
            closing=(f.message_end, f.start, *role, f.channel, *names["final"], f.message),
        )
    if reasoning.open is None:
        return f
    if f.open < 0:
        header = tuple(f.prompt)
        prompt = [*header, *f.texts[reasoning.open.texts[0]]]
        return replace(f, header=header, prompt=prompt, closing=f.texts[reasoning.close.texts[0]])
    if reasoning.opens_in == "response":
        white = (f.blank,) if reasoning.white_space_before_open else ()
        return replace(f, opening=(*white, f.open), closing=(f.close,))
    return replace(f, header=tuple(f.prompt[: f.prompt.index(f.open)]), closing=(f.close,))
