"""The rules that need text: what a tool call says, decoded by the verifier's own tokenizer. All are flags."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from aerie.boundary.grammar import Grammar
from aerie.boundary.judge import Verdict, with_marks
from aerie.boundary.rules import TEXT_RULES
from aerie.errors import BadInput

Decode = Callable[[Sequence[int]], str]


def declared_tools(tools_json: str | None) -> dict[str, Any]:
    """Parameters' JSON schema of each declared tool by name, from a prompt's ``tools`` (None: it declares none).

    Both OpenAI's form ``{"type": "function", "function": {...}}`` and the bare function are read. A tool without
    ``parameters`` has schema ``{}``, which everything satisfies.

    Raises:
        BadInput: the text is not a JSON list of tool declarations.
    """
    if tools_json is None:
        return {}
    try:
        declared = [tool.get("function", tool) for tool in json.loads(tools_json)]
        return {function["name"]: function.get("parameters") or {} for function in declared}
    except json.JSONDecodeError as error:
        raise BadInput(f"tools {tools_json[:200]!r}: expected a JSON list of tool declarations: {error}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput(
            f"tools {tools_json[:200]!r}: expected a JSON list of tool declarations, each an object with a name"
        ) from error


def check_tool_calls(
    verdict: Verdict,
    ids: Sequence[int],
    *,
    decode: Decode,
    tools: Mapping[str, Any] | None,
    grammar: Grammar,
) -> Verdict:
    """The verdict with the text rules applied to its complete tool calls.

    Args:
        verdict: a verdict of ``judge`` or ``judge_mask``.
        ids: the ids that the verdict's positions index.
        decode: token ids to text, special tokens not skipped.
        tools: as ``declared_tools`` gives them; None when it is not known what the prompt declares, and what needs it
            stays unchecked.
        grammar: the grammar of the verdict.
    """
    if grammar.tool_form is None or grammar.tool_id_pattern is None or not verdict.calls:
        return verdict
    pattern = re.compile(grammar.tool_id_pattern, re.DOTALL)
    marks: dict[str, list[int]] = {}
    unchecked = {name for name in verdict.unchecked if name not in TEXT_RULES}
    for call in verdict.calls:
        call_id, body = (
            decode(ids[start:stop]).strip()
            for start, stop in ((call.id_start, call.id_stop), (call.arguments_start, call.arguments_stop))
        )
        for said in _FORMS[grammar.tool_form](_Call(call_id, body, pattern)):
            if said.name is None:
                marks.setdefault("tool_id_malformed", []).append(call.id_start)
            schema = _schema_of(said.name, tools, marks, unchecked, call.id_start)
            failure = _check_arguments(said.arguments, schema, unchecked)
            if failure:
                marks.setdefault(failure, []).append(call.arguments_start)
    return with_marks(verdict, marks, [name for name in verdict.unchecked if name in unchecked])


@dataclass(frozen=True)
class _Call:
    """A call's texts, and the pattern of its family's ids."""

    id: str
    body: str
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class _Said:
    """What one call says. ``name`` is None where its id is malformed.

    ``arguments`` are JSON text; or values as text by name, whose types are those that the tool declares; or None where
    there are none to be found.
    """

    name: str | None
    arguments: str | Mapping[str, str] | None


def _json_call(call: _Call) -> Iterator[_Said]:
    match = call.pattern.fullmatch(call.id)
    yield _Said(match["name"] if match else None, call.body)


def _fenced_json_call(call: _Call) -> Iterator[_Said]:
    match = _FENCED.fullmatch(call.body)
    named = match is not None and call.pattern.fullmatch(call.id) is not None
    yield _Said(match["name"] if match and named else None, match["arguments"] if match else None)


def _named_json_call(call: _Call) -> Iterator[_Said]:
    try:
        body = json.loads(call.body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        # Without an object there is no name to speak of, and nothing else to say of the call.
        yield _Said("", None)
        return
    name = body.get("name") if isinstance(body, dict) else None
    arguments = body.get("arguments") if isinstance(body, dict) else None
    yield _Said(name if isinstance(name, str) else None, None if arguments is None else json.dumps(arguments))


def _pairs_call(call: _Call) -> Iterator[_Said]:
    match = call.pattern.fullmatch(call.id)
    yield _Said(match["name"] if match else None, {m["key"].strip(): m["value"] for m in _PAIR.finditer(call.body)})


def _invoke_call(call: _Call) -> Iterator[_Said]:
    if _INVOKE.sub("", call.body).strip() or not call.body:
        yield _Said(None, {})
    for match in _INVOKE.finditer(call.body):
        yield _Said(match["name"], {m["key"]: m["value"] for m in _PARAMETER.finditer(match["body"])})


_FENCED = re.compile(r"(?P<name>[\w.-]+)\s*```json\n(?P<arguments>.*)\n?```", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)
_INVOKE = re.compile(r"<invoke name=\"(?P<name>[^\"]+)\">(?P<body>.*?)</invoke>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>", re.DOTALL)

_FORMS: Mapping[str, Callable[[_Call], Iterator[_Said]]] = {
    "json": _json_call,
    "fenced_json": _fenced_json_call,
    "named_json": _named_json_call,
    "pairs": _pairs_call,
    "invoke": _invoke_call,
}
"""How a call reads, by the profile's ``tools.form``."""


def _schema_of(
    name: str | None,
    tools: Mapping[str, Any] | None,
    marks: dict[str, list[int]],
    unchecked: set[str],
    position: int,
) -> Any | None:
    """Schema of the called tool; None where there is none to hold the arguments against."""
    if not name or tools is None:
        unchecked |= {"tool_name_unknown", "tool_arguments_schema"}
        return None
    if name not in tools:
        marks.setdefault("tool_name_unknown", []).append(position)
        return None
    return tools[name]


def _check_arguments(said: str | Mapping[str, str] | None, schema: Any | None, unchecked: set[str]) -> str | None:
    """The flag that a call's arguments deserve."""
    if said is None:
        return "tool_arguments_not_json"
    try:
        arguments = (
            _typed(said, schema) if isinstance(said, Mapping) else json.loads(said, parse_constant=_refuse_constant)
        )
    except (ValueError, RecursionError):
        return "tool_arguments_not_json"
    if schema is None:
        return None
    try:
        Draft202012Validator.check_schema(schema)
        valid = Draft202012Validator(schema, registry=Registry()).is_valid(arguments)
    except (SchemaError, Unresolvable, re.error, RecursionError):
        # The source's declaration is itself no schema: nothing can be held against the call.
        unchecked.add("tool_arguments_schema")
        return None
    return None if valid else "tool_arguments_schema"


def _typed(values: Mapping[str, str], schema: Any | None) -> dict[str, Any]:
    """Values written without quotes: text where the schema says so, else JSON where they are JSON."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    declared = properties if isinstance(properties, dict) else {}
    return {key: _value(text, declared.get(key)) for key, text in values.items()}


def _value(text: str, declared: Any | None) -> Any:
    if isinstance(declared, dict) and declared.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> float:
    """NaN and Infinity are Python's extension, not JSON."""
    raise ValueError(f"{name} is not JSON")
