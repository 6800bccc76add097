"""The token grammar of a response: the rules, the verdict, the loss mask.

>>> grammar = compile_grammar(profile, token_ids, vocabulary_size)
>>> judge(prompt_ids, output_ids, grammar=grammar, finish_reason="stop").verdict
'kept'

Numbers and the standard library only: ``generate`` judges with it as rows arrive, ``validate`` and the command line
judge files. What needs text (``aerie.boundary.text_rules``) and the stage are imported apart.
"""

from aerie.boundary.grammar import Grammar, compile_grammar, grammar_of_verifier
from aerie.boundary.judge import Verdict, apply_policy, judge, response_mask
from aerie.boundary.rules import CORRUPT, FLAGS, RULES, RULES_VERSION, Rule, check_drop_flags
from aerie.boundary.segments import judge_mask

__all__ = [
    "CORRUPT",
    "FLAGS",
    "RULES",
    "RULES_VERSION",
    "Grammar",
    "Rule",
    "Verdict",
    "apply_policy",
    "check_drop_flags",
    "compile_grammar",
    "grammar_of_verifier",
    "judge",
    "judge_mask",
    "response_mask",
]
