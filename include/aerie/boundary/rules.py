"""The rules of a response, named after the failure that each prevents.

A ``corrupt`` reason quarantines the row: its capture is broken, or the verifier left its own format or degenerated.
A ``flag`` is the verifier's own behaviour, which a drafter must imitate: the row is kept and counted, and a data
set's policy (``drop_flags``) may drop it, with reason ``policy:<flag>``.

Sources are trackers of public projects, or ``design`` where the rule follows from how Aerie captures.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from aerie.errors import BadInput

RULES_VERSION = 3
"""Part of the rules fingerprint: raise it whenever a row's verdict could change, and logs are judged again."""

Severity = Literal["corrupt", "flag"]


@dataclass(frozen=True)
class Rule:
    """One reason: its severity, why a row is judged so, and where the failure was seen."""

    name: str
    severity: Severity
    rationale: str
    source: str


_CORRUPT = (
    (
        "prompt_not_open",
        "The prompt of a thinking profile ends neither with the open tag, nor with the closed block, nor, where the "
        "model opens its reasoning itself, with the bare header: the template or its switch was wrong, or the loss "
        "mask is off by one. What stands before a trained segment of an imported row must end so in every family.",
        "SpecForge#296, SpecForge#885",
    ),
    (
        "no_open",
        "The model opens its own reasoning in this family, and did not: the tag was stripped, or the prompt has it.",
        "SpecForge#544",
    ),
    (
        "no_close",
        "The row ended by itself without closing its reasoning: the boundary token was stripped, or the "
        "verifier never answered.",
        "sglang#4711, speculators PR#346",
    ),
    (
        "second_open",
        "Reasoning is opened again, in the prompt and in the response or twice in the response.",
        "SpecForge#296",
    ),
    ("second_close", "Reasoning is closed when it is not open.", "sglang#24843"),
    (
        "empty_reasoning",
        "Thinking is on and the reasoning holds nothing, or only white space: it was stripped.",
        "SpecForge#544, speculators PR#346",
    ),
    ("empty_answer", "There is no answer and no tool call.", "litellm-docs PR#559"),
    ("missing_end", "No end-of-turn token, and the cap did not cut the row: a front end stripped it.", "dynamo#14302"),
    ("tokens_after_end", "Tokens follow the end of the turn.", "vllm PR#47616"),
    (
        "end_without_stop",
        "The row has its end token, yet the server says 'length' below the cap: ids and metadata "
        "belong to different rows, or the cap was another.",
        "sglang: the cap is tested before the end token",
    ),
    (
        "stop_without_end",
        "The server says 'stop', yet the row has no end token: it was stripped, or a token that the "
        "profile does not know stopped the row.",
        "dynamo#14302",
    ),
    (
        "foreign_special_token",
        "A special token that a response may not hold (another turn's header, padding), or, where messages have "
        "channels, a token of a message's frame out of its order.",
        "vllm PR#28543",
    ),
    ("id_out_of_range", "An id outside the vocabulary: another tokenizer, or a broken file.", "design"),
    ("prompt_echoed", "The response begins with tokens of its prompt.", "sglang#17240, sglang#10896"),
    (
        "count_mismatch",
        "The number of ids is not the server's completion_tokens: ids were lost or added.",
        "sglang#17240, dynamo#14302",
    ),
    (
        "tool_unbalanced",
        "A tool token out of its order, text between the calls of a section or between the tokens of an argument, or a "
        "section or call without its end.",
        "vllm PR#28543",
    ),
    ("tool_nested", "A tool section inside a section, or a call inside a call.", "vllm#24478"),
    (
        "think_tag_while_off",
        "Thinking is off (the prompt ends with the closed block) and the response holds a tag.",
        "Automodel: a template switch that the model ignores",
    ),
    (
        "aborted",
        "The server aborted the request, perhaps inside a 200: the row is incomplete.",
        "sglang: finish_reason 'abort'",
    ),
    (
        "loop",
        "The same 1 to 128 tokens, at least three exact copies and 48 tokens, to the end of the response or over "
        "more than a quarter of it: the verifier degenerated.",
        "sglang#23264, sglang#24091",
    ),
    (
        "prompt_mismatch",
        "The response's prompt hash is not that of the prompt with its sample id, or there is no such "
        "prompt: response and prompt belong to different populations.",
        "SpecForge PR#458, DeepSpec#35",
    ),
    (
        "mask_mismatch",
        "An imported row's loss mask has another length than its ids, or values other than 0 and 1.",
        "SpecForge#885",
    ),
    ("mask_empty", "An imported row's loss mask trains nothing.", "Model-Optimizer PR#2049"),
)

_FLAGS = (
    ("ended_at_cap", "A valid end on the cap's last token; SGLang tests the cap first and says 'length'. The row is "
     "complete.", "sglang: the cap is tested before the end token"),
    ("truncated_in_reasoning", "The cap cut the reasoning. What was written is the verifier's own.",
     "speculators PR#835"),
    ("truncated_in_answer", "The cap cut the answer.", "speculators PR#835"),
    ("truncated_in_tool_call", "The cap cut the tool section.", "speculators PR#835"),
    ("close_missing_before_tools", "Reasoning went straight to the tool section without its closing tag, which this "
     "family does by itself.", "vllm PR#32216"),
    ("tool_id_malformed", "A call's id does not have the family's form.", "exo#2281"),
    ("tool_name_unknown", "A call names a tool that the prompt does not declare.", "design"),
    ("tool_arguments_not_json", "A call's arguments are not JSON.", "vllm PR#28543"),
    ("tool_arguments_schema", "A call's arguments do not satisfy the tool's declared JSON schema.", "design"),
    ("repetition", "A cycle as for 'loop', but small and inside the response: tables of zeros and rules of dashes "
     "are legitimate.", "sglang#23264"),
)  # fmt: skip

RULES: Mapping[str, Rule] = {
    **{name: Rule(name, "corrupt", rationale, source) for name, rationale, source in _CORRUPT},
    **{name: Rule(name, "flag", rationale, source) for name, rationale, source in _FLAGS},
}

CORRUPT = frozenset(name for name, rule in RULES.items() if rule.severity == "corrupt")
FLAGS = frozenset(name for name, rule in RULES.items() if rule.severity == "flag")

TEXT_RULES = ("tool_id_malformed", "tool_name_unknown", "tool_arguments_not_json", "tool_arguments_schema")
"""Flags that need decoded text."""

SUPPRESSED_BY_CUT = frozenset({"no_close", "missing_end", "empty_answer", "tool_unbalanced"})
"""What ``truncated_*`` and ``aborted`` explain, and therefore suppress; nothing else."""

POLICY_PREFIX = "policy:"


def check_drop_flags(drop_flags: Iterable[str]) -> frozenset[str]:
    """Return a data set's ``drop_flags`` as a set.

    Raises:
        BadInput: a name is not a flag.
    """
    wanted = frozenset(drop_flags)
    unknown = sorted(wanted - FLAGS)
    if unknown:
        raise BadInput(f"drop_flags: {', '.join(unknown)}: expected some of {', '.join(sorted(FLAGS))}")
    return wanted
