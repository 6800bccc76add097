"""Judging any file of responses: JSON lines or Parquet with ``prompt_ids`` and ``output_ids``, made with any tool.

Other columns are used where they are there: ``id``, ``finish_reason`` (a string, or SGLang's dictionary),
``completion_tokens``, ``max_new_tokens``, ``tools``. What cannot be checked without them, or without a tokenizer, is
listed in ``unchecked``, never passed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from aerie.boundary.grammar import Grammar, compile_grammar
from aerie.boundary.judge import Verdict, judge
from aerie.boundary.rows import decoder
from aerie.boundary.text_rules import Decode, check_tool_calls, declared_tools
from aerie.errors import BadInput
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.profile import load_profile

ROWS_PER_BATCH = 512
REQUIRED = ("prompt_ids", "output_ids")
OPTIONAL = ("id", "finish_reason", "completion_tokens", "max_new_tokens", "tools")

NEEDS_VOCABULARY = "foreign_special_token"
"""Without a tokenizer only the special tokens that the profile names are known."""


class FileVerdict(BaseModel):
    """Verdict on one row of a file; ``row`` counts from 0, ``positions`` are indices into ``output_ids``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    row: int
    id: Any
    verdict: str
    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    positions: Mapping[str, tuple[int, ...]]
    unchecked: tuple[str, ...]
    reasoning_tokens: int
    answer_tokens: int
    tool_calls: int


def judge_file(
    path: Path, profile: str, *, tokenizer: Path | None = None, trust_remote_code: bool = False
) -> Iterator[FileVerdict]:
    """Judge the rows of ``path`` in order; memory holds a few rows.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file.
        profile: name of the verifier's profile.
        tokenizer: the verifier's checkpoint folder, for the rules that need text (needs the model environment).
        trust_remote_code: whether that folder's own code may run, where the profile needs it.

    Raises:
        BadInput: the file cannot be read, a row has no token ids, or the profile's ids are not known without a
            tokenizer.
    """
    if tokenizer is None:
        grammar, decode = _grammar_of_profile(profile), None
    else:
        grammar, decode = _grammar_of_checkpoint(profile, tokenizer, trust_remote_code)
    for number, row in enumerate(_rows(path)):
        where = f"{path}, row {number}"
        verdict = _judge_row(row, grammar, decode, where)
        yield FileVerdict(
            file=str(path),
            row=number,
            id=row.get("id"),
            verdict=verdict.verdict,
            reasons=verdict.reasons,
            flags=verdict.flags,
            positions=verdict.positions,
            unchecked=verdict.unchecked if decode else (*verdict.unchecked, NEEDS_VOCABULARY),
            reasoning_tokens=verdict.reasoning_tokens,
            answer_tokens=verdict.answer_tokens,
            tool_calls=verdict.tool_calls,
        )


def _grammar_of_profile(name: str) -> Grammar:
    profile = load_profile(name)
    if profile.vocabulary_size is None:
        raise BadInput(f"profile {name} does not fix its token ids: name the verifier's folder with --tokenizer")
    return compile_grammar(profile, profile.expected_ids, profile.vocabulary_size)


def _grammar_of_checkpoint(name: str, checkpoint: Path, trust_remote_code: bool) -> tuple[Grammar, Decode]:
    from aerie.prompts.checkpoint import load_verifier

    verifier = load_verifier(VerifierSettings(path=checkpoint, profile=name, trust_remote_code=trust_remote_code))
    tokens = verifier.tokens
    grammar = compile_grammar(
        verifier.profile, tokens.token_ids, tokens.vocabulary_size, whitespace_ids=tokens.whitespace_ids
    )
    return grammar, decoder(verifier.tokenizer, tokens.vocabulary_size)


def _judge_row(row: Mapping[str, Any], grammar: Grammar, decode: Decode | None, where: str) -> Verdict:
    output = _ids(row, "output_ids", where)
    try:
        verdict = judge(
            _ids(row, "prompt_ids", where),
            output,
            grammar=grammar,
            finish_reason=row.get("finish_reason"),
            completion_tokens=_count(row, "completion_tokens", where),
            max_new_tokens=_count(row, "max_new_tokens", where),
        )
        if decode is None:
            return verdict
        tools = declared_tools(_as_json(row["tools"])) if "tools" in row else None
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    return check_tool_calls(verdict, output, decode=decode, tools=tools, grammar=grammar)


def _as_json(tools: Any) -> str | None:
    return tools if tools is None or isinstance(tools, str) else json.dumps(tools)


def _ids(row: Mapping[str, Any], name: str, where: str) -> Sequence[int]:
    ids = row.get(name)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadInput(f"{where}: expected {name} to be a list of integers")
    return ids


def _count(row: Mapping[str, Any], name: str, where: str) -> int | None:
    count = row.get(name)
    if count is not None and type(count) is not int:
        raise BadInput(f"{where}: expected {name} to be an integer, found {count!r}")
    return count


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    readers = {".jsonl": _json_lines, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise BadInput(f"{path}: expected a file named .jsonl or .parquet")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_object(line, f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not UTF-8: {error}") from error


def _json_object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadInput(f"{where}: expected an object, found {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in (*REQUIRED, *OPTIONAL) if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path}: not a Parquet file, or a damaged one: {error}") from error
