"""A conversation's history as prompt ids, fitted to the verifier's context by whole turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from aerie.errors import BadInput
from aerie.prompts.checkpoint import Verifier
from aerie.prompts.identity import chosen
from aerie.sources.conversation import Message, Unusable, answer_positions

# What a template raises on messages that it does not accept: its own refusals and Python's errors inside expressions.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
TOO_LONG = "prompt_too_long"

PROBES: tuple[Sequence[Message], ...] = (
    ({"role": "user", "content": "Hello."},),
    (
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And now?"},
    ),
)


@dataclass(frozen=True)
class Rendered:
    """A prompt that fits: ``history`` are the messages it was rendered from, ``turn`` the answer that it asks for."""

    history: Sequence[Message]
    turn: int
    prompt_ids: list[int]


def render(verifier: Verifier, history: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """Prompt ids of ``history`` through the verifier's own chat template, up to where its answer begins.

    Raises:
        Unusable: the template rejects the messages, a text holds a control token of the verifier, or the prompt does
            not end as the profile says.
    """
    for text in _texts([history, tools]):
        if found := verifier.control_texts.search(text):
            raise Unusable("control_token_in_text", f"a text holds {found[0]!r}, which would become a control token")
    try:
        prompt = verifier.tokenizer.apply_chat_template(
            list(history), tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **verifier.switches
        )
    except TEMPLATE_ERRORS as error:
        raise Unusable("template_rejected", f"{type(error).__name__}: {error}") from error
    ids: list[int] = verifier.tokenizer.encode(prompt, add_special_tokens=False)
    if verifier.tail and tuple(ids[-len(verifier.tail) :]) != verifier.tail:
        raise Unusable("unexpected_prompt_end", f"expected ids ending in {list(verifier.tail)}, found {ids[-8:]}")
    return ids


def probe(verifier: Verifier) -> None:
    """Render two plain conversations, so that a template or profile that never works ends the stage at once.

    Raises:
        BadInput: one of them cannot be rendered.
    """
    for history in PROBES:
        try:
            render(verifier, history, ())
        except Unusable as problem:
            raise BadInput(
                f"a plain conversation of {len(history)} messages cannot be rendered for profile "
                f"{verifier.profile.name}: {problem}; compare the checkpoint's chat template with the profile's "
                "template_switches and generation_prompt_tail"
            ) from problem


def render_fitting(
    verifier: Verifier,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    maximum_tokens: int,
    seed: int,
    conversation_id: str,
) -> Rendered:
    """Render the history ``messages``; if it is too long, an earlier turn of the same conversation that fits.

    The earlier turn is drawn among all that fit, so that long conversations do not pile up at the limit.

    Raises:
        Unusable: as ``render``; or not even the first turn fits (``prompt_too_long``).
    """
    positions = answer_positions(messages)
    ids = render(verifier, messages, tools)
    if len(ids) <= maximum_tokens:
        return Rendered(messages, len(positions) - 1, ids)
    fitting = 0
    beyond = len(positions) - 1
    while fitting < beyond:
        middle = (fitting + beyond) // 2
        if len(render(verifier, messages[: positions[middle]], tools)) <= maximum_tokens:
            fitting = middle + 1
        else:
            beyond = middle
    if not fitting:
        shortest = len(render(verifier, messages[: positions[0]], tools))
        raise Unusable(TOO_LONG, f"the first turn has {shortest} tokens, more than {maximum_tokens}")
    position = chosen(positions[:fitting], seed=seed, conversation_id=conversation_id)
    history = messages[:position]
    return Rendered(history, positions.index(position), render(verifier, history, tools))


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
