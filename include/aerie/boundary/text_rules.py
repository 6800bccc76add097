"""The rules that need text: what a tool call says, decoded by the verifier's own tokenizer. All are flags."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
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
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput(f"tools {tools_json[:200]!r}: expected a JSON list of tool declarations: {error!r}") from error


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
    if grammar.tool_id_pattern is None or not verdict.calls:
        return verdict
    pattern = re.compile(grammar.tool_id_pattern)
    marks: dict[str, list[int]] = {}
    unchecked = {name for name in verdict.unchecked if name not in TEXT_RULES}
    for call in verdict.calls:
        call_id = decode(ids[call.id_start : call.id_stop]).strip()
        match = pattern.fullmatch(call_id)
        if match is None:
            marks.setdefault("tool_id_malformed", []).append(call.id_start)
        known = _schema_of(match, tools, marks, unchecked, call.id_start)
        failure = _check_arguments(decode(ids[call.arguments_start : call.arguments_stop]), known, unchecked)
        if failure:
            marks.setdefault(failure, []).append(call.arguments_start)
    return with_marks(verdict, marks, [name for name in verdict.unchecked if name in unchecked])


def _schema_of(
    match: re.Match[str] | None,
    tools: Mapping[str, Any] | None,
    marks: dict[str, list[int]],
    unchecked: set[str],
    position: int,
) -> Any | None:
    """Schema of the called tool; None where there is none to hold the arguments against."""
    if match is None or tools is None:
        unchecked |= {"tool_name_unknown", "tool_arguments_schema"}
        return None
    name = match["name"]
    if name not in tools:
        marks.setdefault("tool_name_unknown", []).append(position)
        return None
    return tools[name]


def _check_arguments(text: str, schema: Any | None, unchecked: set[str]) -> str | None:
    """The flag that a call's arguments deserve."""
    try:
        arguments = json.loads(text, parse_constant=_refuse_constant)
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


def _refuse_constant(name: str) -> float:
    """NaN and Infinity are Python's extension, not JSON."""
    raise ValueError(f"{name} is not JSON")
