"""Dumps of text: what they have lost is said, and what only token ids show is never passed."""

from pathlib import Path
from typing import Any

import pytest

from aerie.boundary.files import FileVerdict, judge_file
from aerie.boundary.rules import RULES
from aerie.boundary.text_dumps import TextJudge
from aerie.settings.profile import load_profile

from .test_files import written


def row_of(content: Any, reasoning: Any = None, *, field: str = "reasoning_content", **others: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, field: reasoning}
    return {"messages": [{"role": "user", "content": "?"}, message], "finish_reason": "stop", **others}


def counted(tokens: int) -> dict[str, Any]:
    return {"usage": {"completion_tokens": tokens}}


def verdict_of(tmp_path: Path, row: dict[str, Any], name: str = "rows.jsonl") -> FileVerdict:
    (verdict,) = judge_file(written(tmp_path / name, [row]), "kimi_k25")
    assert isinstance(verdict, FileVerdict), verdict
    return verdict


CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("row", "reasons", "flags"),
    [
        (row_of("Paris", "The capital.", **counted(9)), (), ()),
        (row_of("Paris", "The capital.", field="reasoning"), (), ()),
        (row_of("Paris", "", **counted(900)), ("reasoning_lost",), ()),
        (row_of("Paris", " \n", field="reasoning", **counted(900)), ("reasoning_lost",), ()),
        (row_of("Paris", completion_tokens=900), ("reasoning_lost",), ()),
        (row_of("P", usage={"completion_tokens": 3, "reasoning_tokens": 2}), ("reasoning_lost",), ()),
        (row_of("Paris", "", **counted(5)), ("empty_reasoning",), ()),
        (row_of("Paris", ""), ("empty_reasoning",), ()),
        (row_of("<think>The capital.</think>Paris"), ("tag_in_text",), ()),
        (row_of("The capital.</think>Paris", **counted(9)), ("tag_in_text",), ()),
        (row_of("Paris", "The capital.</think>"), ("tag_in_text",), ()),
        (row_of("<|tool_calls_section_begin|>", "I call it."), ("special_token_in_text",), ()),
        (row_of("", "The capital."), ("empty_answer",), ()),
        (row_of(None, "I call it.", tool_calls=[CALL]), ("empty_answer",), ()),
        (row_of("", "The", finish_reason="length"), (), ("truncated_in_reasoning",)),
        (row_of("Par", "The", finish_reason={"type": "length"}), (), ("truncated_in_answer",)),
        (row_of([{"type": "text", "text": "Paris"}], "The capital."), (), ()),
    ],
)
def test_what_a_row_of_text_has_lost_is_said(
    tmp_path: Path, row: dict[str, Any], reasons: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    verdict = verdict_of(tmp_path, row)
    assert (verdict.reasons, verdict.flags) == (reasons, flags)
    assert verdict.verdict == ("quarantined" if reasons else "kept")
    assert (verdict.reasoning_tokens, verdict.answer_tokens) == (None, None)


def test_no_rule_that_needs_token_ids_passes_a_row_of_text(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, row_of("Paris", "The capital."))
    decided = {"empty_reasoning", "empty_answer", "aborted", "truncated_in_reasoning", "truncated_in_answer",
               "tool_arguments_not_json"}  # fmt: skip
    not_of_files = {"prompt_mismatch", "mask_mismatch", "mask_empty"}
    assert {*RULES} - decided - not_of_files <= {*verdict.unchecked}
    assert "reasoning_lost" not in verdict_of(tmp_path, row_of("Paris", "x", **counted(3))).unchecked
    without = row_of("Paris", "x")
    del without["finish_reason"]
    assert "truncated_in_answer" in verdict_of(tmp_path, without).unchecked


def test_tool_calls_of_a_message_are_counted_and_their_arguments_read(tmp_path: Path) -> None:
    row = row_of(None, "I call it.")
    row["messages"][-1]["tool_calls"] = [CALL, {"function": {"name": "g", "arguments": "{"}}]
    verdict = verdict_of(tmp_path, row)
    assert (verdict.tool_calls, verdict.reasons, verdict.flags) == (2, (), ("tool_arguments_not_json",))


def test_text_in_parquet_is_read_as_in_json_lines(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, row_of("Paris", "", **counted(900)), "rows.parquet").reasons == ("reasoning_lost",)


def test_with_a_tokenizer_a_count_that_the_text_explains_shows_that_thinking_was_off() -> None:
    judge = TextJudge(load_profile("kimi_k25"), lambda text: [1] * len(text.split()))
    answer = row_of("Paris is the capital of France", "", **counted(7))
    assert judge.judge(answer, "here").reasons == ()
    verdict = judge.judge(row_of("Paris is the capital of France", "", **counted(40)), "here")
    assert verdict.reasons == ("reasoning_lost",)
    assert (verdict.reasoning_tokens, verdict.answer_tokens) == (0, 6)


def test_family_that_does_not_reason_has_no_reasoning_to_lose(tmp_path: Path) -> None:
    profile = load_profile("kimi_k25").model_copy(
        update={"reasoning": load_profile("kimi_k25").reasoning.model_copy(update={"opens_in": "never"})}
    )
    assert TextJudge(profile, None).judge(row_of("Paris", None, **counted(900)), "here").reasons == ()
