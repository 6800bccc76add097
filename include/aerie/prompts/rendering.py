"""A conversation's history as prompt ids, fitted to the verifier's context by whole turns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import jinja2

from aerie.errors import BadInput
from aerie.prompts.checkpoint import Verifier
from aerie.prompts.identity import chosen
from aerie.settings.pipeline import Turns
from aerie.sources.conversation import Message, Unusable, answer_positions, declaration, tool_call

# What a template raises on messages that it does not accept: its own refusals and Python's errors inside expressions.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
TOO_LONG = "prompt_too_long"
WITHOUT_TOOLS = "template_without_tools"
CLOCK = "strftime_now"

PROBES: tuple[Sequence[Message], ...] = (
    ({"role": "user", "content": "Hello."},),
    (
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And now?"},
    ),
)
_PROBE_TOOL = declaration(
    "probe_function", "Probes", {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
)
_PROBE_VALUE, _PROBE_RESULT = "ProbedPlace", "ProbedResult"
_PROBE_CALLS: Sequence[Message] = (
    *PROBES[0],
    {"role": "assistant", "content": "", "tool_calls": [tool_call("probe_function", {"place": _PROBE_VALUE}, 0)]},
    {"role": "tool", "tool_call_id": "functions.probe_function:0", "content": _PROBE_RESULT},
)


@dataclass(frozen=True)
class Rendered:
    """A prompt that fits: ``history`` are the messages it was rendered from, ``turn`` the answer that it asks for."""

    history: Sequence[Message]
    turn: int
    prompt_ids: list[int]


class Renderer:
    """Renders histories through the verifier's own chat template, once it was seen to work.

    A template says nothing of the tools that it does not read, and each takes a call's arguments in its own form:
    Qwen's and Llama's as objects, DeepSeek's as JSON text. Both are found by rendering a call and looking for it.

    Raises:
        BadInput: a plain conversation cannot be rendered with the profile, or the template writes today's date into
            prompts and ``prompt_date`` does not say which.
    """

    def __init__(self, verifier: Verifier, prompt_date: date | None = None) -> None:
        self.verifier = verifier
        self._variables = dict(verifier.switches)
        if CLOCK in verifier.template:
            if prompt_date is None:
                raise BadInput(
                    "the chat template writes today's date into prompts: set verifier.prompt_date (such as "
                    "2026-11-29), so that the same prompts can be made again on another day"
                )
            # In the place of the function of that name that transformers gives to templates.
            self._variables[CLOCK] = prompt_date.strftime
        for history in PROBES:
            try:
                self.render(history, ())
            except Unusable as problem:
                raise BadInput(
                    f"a plain conversation of {len(history)} messages cannot be rendered for profile "
                    f"{verifier.profile.name}: {problem}; compare the checkpoint's chat template with the profile's "
                    "template_switches and generation_prompt_tail"
                ) from problem
        self._declares_tools = "probe_function" in (self._probed(PROBES[0]) or "")
        self._arguments = self._form_of_arguments()

    def render(self, history: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt ids of ``history``, up to where its answer begins.

        Raises:
            Unusable: the template rejects the messages or does not read tools, a text holds a control token of the
                verifier, or the prompt does not end as the profile says.
        """
        verifier = self.verifier
        for text in _texts([history, tools]):
            if found := verifier.control_texts.search(text):
                raise Unusable(
                    "control_token_in_text", f"a text holds {found[0]!r}, which would become a control token"
                )
        if tools and not self._declares_tools:
            raise Unusable(WITHOUT_TOOLS, "the chat template does not render declarations of tools")
        calls = any(message.get("tool_calls") for message in history)
        if calls and self._arguments is None:
            raise Unusable(WITHOUT_TOOLS, "the chat template does not render calls of tools and their results")
        try:
            prompt = self._text(_as_text(history) if calls and self._arguments == "text" else history, tools)
        except TEMPLATE_ERRORS as error:
            raise Unusable("template_rejected", f"{type(error).__name__}: {error}") from error
        ids: list[int] = verifier.tokenizer.encode(prompt, add_special_tokens=False)
        if verifier.tail and tuple(ids[-len(verifier.tail) :]) != verifier.tail:
            raise Unusable("unexpected_prompt_end", f"expected ids ending in {list(verifier.tail)}, found {ids[-8:]}")
        return ids

    def _text(self, history: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        text: str = self.verifier.tokenizer.apply_chat_template(
            list(history),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
            **self._variables,
        )
        return text

    def _probed(self, history: Sequence[Message]) -> str | None:
        """The text of a probe with a tool, None where the template rejects it."""
        try:
            return self._text(history, (_PROBE_TOOL,))
        except TEMPLATE_ERRORS:
            return None

    def _form_of_arguments(self) -> Literal["object", "text"] | None:
        """How the template takes the arguments of a call; None where it does not show a call and its result whole."""
        for form, history in (("object", _PROBE_CALLS), ("text", _as_text(_PROBE_CALLS))):
            text = self._probed(history) or ""
            # Python's own way to write an object, in single quotes, is no way in which a model was taught.
            whole = all(part in text for part in (_PROBE_VALUE, _PROBE_RESULT)) and f"'{_PROBE_VALUE}'" not in text
            if whole:
                return "object" if form == "object" else "text"
        return None


def _as_text(history: Sequence[Message]) -> list[Message]:
    """Messages whose calls have their arguments as JSON text."""
    return [
        {**message, "tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in history
    ]


def _call_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


@dataclass(frozen=True)
class Fit:
    """How a history is fitted: to ``maximum_tokens``, by an earlier turn where ``turns`` leaves a choice."""

    maximum_tokens: int
    turns: Turns
    seed: int

    def render(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        conversation_id: str,
    ) -> Rendered:
        """Render the history ``messages``; if it is too long, an earlier turn of the same conversation that fits.

        For ``one`` the earlier turn is drawn among all that fit, so that long conversations do not pile up at the
        limit; for ``last`` it is the last that fits; ``first`` and ``every`` have no other turn to take.

        Raises:
            Unusable: as ``Renderer.render``; or no turn fits (``prompt_too_long``).
        """
        positions = answer_positions(messages)
        ids = renderer.render(messages, tools)
        if len(ids) <= self.maximum_tokens:
            return Rendered(messages, len(positions) - 1, ids)
        fitting = self._fitting(renderer, messages, tools, positions) if self.turns in ("one", "last") else []
        if not fitting:
            raise Unusable(TOO_LONG, f"a prompt of {len(ids)} tokens, more than {self.maximum_tokens}")
        drawn = chosen(fitting, seed=self.seed, conversation_id=conversation_id)
        position = drawn if self.turns == "one" else fitting[-1]
        history = messages[:position]
        return Rendered(history, positions.index(position), renderer.render(history, tools))

    def _fitting(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        positions: Sequence[int],
    ) -> Sequence[int]:
        """Positions before the last whose histories fit, found by halving: a longer history has more tokens."""
        fitting, beyond = 0, len(positions) - 1
        while fitting < beyond:
            middle = (fitting + beyond) // 2
            if len(renderer.render(messages[: positions[middle]], tools)) <= self.maximum_tokens:
                fitting = middle + 1
            else:
                beyond = middle
        return positions[:fitting]


def _texts(value: Any) -> Iterator[str]:
    """Every text inside of messages or declarations, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
