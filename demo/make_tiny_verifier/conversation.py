"""What a made-up conversation is, and how one turn of it becomes a prompt and a completion.

Prompts are always rendered by the tokenizer's own chat template, so that what the verifier learns is what
the pipeline will send to it. Only the completion, which no template renders, is put together here.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

HELD_OUT_OF = 8
"""One conversation in this many is never trained on: the sample sources are made of these."""


@dataclass(frozen=True)
class ToolCall:
    """A call of one declared function; `arguments` is a JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the assistant is asked, and all that it then writes.

    `request` is the user's message or, if the turn before called a tool, what the tool returned.
    `answer` may be empty only where there is a tool call.
    """

    request: str
    reasoning: str
    answer: str
    tool_call: ToolCall | None = None


@dataclass(frozen=True)
class Conversation:
    """`tools` are bare function declarations: `{"name", "description", "parameters"}`.

    `subject` is what is asked first without any wrapping of it, where that is not the first request itself.
    """

    dataset: str
    turns: tuple[Turn, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    subject: str | None = None

    @property
    def asked_first(self) -> str:
        """What tells this conversation from others of its data set."""
        return self.subject or self.turns[0].request

    @property
    def is_held_out(self) -> bool:
        """Whether the hash of what is asked first puts the conversation among those never trained on."""
        return hashlib.sha256(self.asked_first.encode()).digest()[0] % HELD_OUT_OF == 0

    def call_id(self, index: int) -> str:
        """Kimi's id of the call that turn `index` makes: calls are counted over the whole conversation."""
        earlier = sum(turn.tool_call is not None for turn in self.turns[:index])
        return f"functions.{self.turns[index].tool_call.name}:{earlier}"

    def prompt_messages(self, index: int, keep_reasoning: bool = False) -> list[dict[str, Any]]:
        """The messages that turn `index` answers; earlier reasoning is left out unless asked for."""
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for position, turn in enumerate(self.turns[: index + 1]):
            if position and self.turns[position - 1].tool_call:
                call_id = self.call_id(position - 1)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": turn.request})
            else:
                messages.append({"role": "user", "content": turn.request})
            if position == index:
                return messages
            message: dict[str, Any] = {"role": "assistant", "content": turn.answer}
            if keep_reasoning:
                message["reasoning_content"] = turn.reasoning
            if turn.tool_call:
                function = {"name": turn.tool_call.name, "arguments": json.dumps(turn.tool_call.arguments)}
                message["tool_calls"] = [{"id": self.call_id(position), "type": "function", "function": function}]
            messages.append(message)
        raise IndexError(f"turn {index} of a conversation of {len(self.turns)}")

    def prompt(
        self,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        thinking: bool = True,
        keep_reasoning: bool = False,
    ) -> str:
        """The text that turn `index` continues, as the chat template renders it."""
        tools = [{"type": "function", "function": declaration} for declaration in self.tools]
        return tokenizer.apply_chat_template(
            self.prompt_messages(index, keep_reasoning),
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=False,
            thinking=thinking,
        )

    def completion(self, index: int, thinking: bool = True) -> str:
        """All that the assistant writes after that prompt, its `<|im_end|>` included."""
        turn = self.turns[index]
        text = f"{turn.reasoning}</think>{turn.answer}" if thinking else turn.answer
        if turn.tool_call:
            text += (
                f"<|tool_calls_section_begin|><|tool_call_begin|>{self.call_id(index)}"
                f"<|tool_call_argument_begin|>{json.dumps(turn.tool_call.arguments)}"
                "<|tool_call_end|><|tool_calls_section_end|>"
            )
        return text + "<|im_end|>"
