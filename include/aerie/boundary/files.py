"""Judging any file of responses, made with any tool: JSON lines or Parquet with ``prompt_ids`` and ``output_ids``.

Other columns are used where they are there: ``id``, ``finish_reason`` (a string, or SGLang's dictionary),
``completion_tokens``, ``max_new_tokens``, ``tools``. What cannot be checked without them, or without a tokenizer, is
listed in ``unchecked``, never passed. Rows of text (``messages``) are looked at by ``aerie.boundary.text_dumps``.

A row that cannot be read (not JSON, without its columns, ids that are no integers) is not judged and does not end the
file: it comes as an ``UnreadableRow``. A file that cannot be read (missing, damaged, cut short) is an error.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from aerie.boundary.grammar import Grammar, Kind, grammar_of_profile, grammar_of_verifier
from aerie.boundary.judge import Verdict, judge
from aerie.boundary.row_files import FileRow, count, iterate_file, plain, token_ids
from aerie.boundary.rows import decoder
from aerie.boundary.text_dumps import TextJudge, TextVerdict, finish_of, is_text_row
from aerie.boundary.text_rules import Decode, check_tool_calls, declared_tools
from aerie.errors import BadInput
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.profile import load_profile

COLUMNS = (
    "prompt_ids", "output_ids", "id", "finish_reason", "completion_tokens", "max_new_tokens", "tools",
    "messages", "usage",
)  # fmt: skip
"""Columns that are read."""

NEEDS_VOCABULARY = ("foreign_special_token",)
"""Without a tokenizer only the special tokens that the profile names are known."""

NEEDS_WHITE_SPACE = ("empty_reasoning", "empty_answer")
"""Without white-space ids, white space counts as text."""

NEEDS_TAGS = ("no_close", "second_open", "second_close", "empty_reasoning")
"""Where the tags are spelled by ordinary tokens, only a tokenizer knows them."""

_ENCODER = json.JSONEncoder(allow_nan=False)

CACHED_TOOLS_CHARACTERS = 16 << 10
"""The same declarations stand in many rows; larger ones are read anew, so that memory stays flat."""

_cached_tools = lru_cache(maxsize=256)(declared_tools)


@dataclass(frozen=True)
class FileVerdict:
    """Verdict on one row of a file.

    ``row`` counts from 0; ``positions`` are indices into ``output_ids``. Token counts are None for a row of text that
    is looked at without a tokenizer.
    """

    file: str
    row: int
    id: Any
    verdict: str
    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    positions: Mapping[str, tuple[int, ...]]
    unchecked: tuple[str, ...]
    reasoning_tokens: int | None
    answer_tokens: int | None
    tool_calls: int

    @property
    def kept(self) -> bool:
        """Whether nothing corrupt was found."""
        return self.verdict == "kept"

    def as_json(self) -> str:
        """One line of JSON, all of it ASCII, whatever the row's id is."""
        return _ENCODER.encode({**vars(self), "id": plain(self.id)})


@dataclass(frozen=True)
class UnreadableRow:
    """A row that could not be judged; the problem names file and row, and what was expected."""

    file: str
    row: int
    problem: str


class FileJudge:
    """A verifier's family, compiled to judge files."""

    def __init__(self, grammar: Grammar, text: TextJudge, decode: Decode | None) -> None:
        self._grammar = grammar
        self._text = text
        self._decode = decode
        knows_white_space = bool((grammar.kinds == Kind.WHITESPACE).any())
        self._always_unchecked = (
            *(() if decode else NEEDS_VOCABULARY),
            *(() if knows_white_space else NEEDS_WHITE_SPACE),
            *(() if grammar.tags_known else NEEDS_TAGS),
        )

    @classmethod
    def of(
        cls,
        profile: str,
        *,
        tokenizer: Path | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Compile the profile of that name.

        Args:
            profile: name of the verifier's profile.
            tokenizer: the verifier's checkpoint folder, for the rules that need text (needs the model environment).
            trust_remote_code: whether that folder's own code may run, where the profile needs it.
            revision: the commit of that code, without which it does not run.

        Raises:
            BadInput: there is no such profile, its ids are not known without a tokenizer, or the tokenizer is of
                another family.
        """
        if tokenizer is None:
            family = load_profile(profile)
            try:
                return cls(grammar_of_profile(family), TextJudge(family, None), None)
            except BadInput as error:
                hint = "" if "--tokenizer" in str(error) else "; or name the verifier's folder with --tokenizer"
                raise BadInput(f"{error}{hint}") from error
        from aerie.prompts.checkpoint import load_verifier

        verifier = load_verifier(
            VerifierSettings(path=tokenizer, profile=profile, trust_remote_code=trust_remote_code, revision=revision)
        )
        tokens = verifier.tokens
        grammar = grammar_of_verifier(verifier.profile, tokens)

        def encode(text: str) -> Sequence[int]:
            ids: Sequence[int] = verifier.tokenizer.encode(text, add_special_tokens=False)
            return ids

        return cls(grammar, TextJudge(verifier.profile, encode), decoder(verifier.tokenizer, tokens.vocabulary_size))

    def judge(self, path: Path) -> Iterator[FileVerdict | UnreadableRow]:
        """Judge the rows of ``path`` in their order; memory holds a few rows. ``-`` is the standard input.

        Raises:
            BadInput: the file cannot be read, or holds no row; verdicts on what came before were yielded.
        """
        number = -1
        for row in iterate_file(path, COLUMNS):
            number = row.number
            try:
                yield self._judge(row, str(path))
            except BadInput as error:
                yield UnreadableRow(str(path), number, str(error))
        if number < 0:
            raise BadInput(f"{path}: holds no row: nothing was judged")

    def _judge(self, row: FileRow, file: str) -> FileVerdict:
        if row.problem is not None:
            raise BadInput(f"{row.where}: {row.problem}")
        if is_text_row(row.values):
            return _verdict_of(row, file, self._text.judge(row.values, row.where), {})
        verdict = self._judge_ids(row)
        unchecked = dict.fromkeys((*verdict.unchecked, *self._always_unchecked))
        found = {*verdict.reasons, *verdict.flags}
        not_found = tuple(name for name in unchecked if name not in found)
        return _verdict_of(row, file, verdict, verdict.positions, not_found)

    def _judge_ids(self, row: FileRow) -> Verdict:
        output = token_ids(row, "output_ids")
        verdict = judge(
            token_ids(row, "prompt_ids"),
            output,
            grammar=self._grammar,
            finish_reason=finish_of(row.values.get("finish_reason"), row.where),
            completion_tokens=count(row, "completion_tokens", least=0),
            max_new_tokens=count(row, "max_new_tokens", least=1),
        )
        tools = _tools_of(row)
        if self._decode is None or not verdict.calls:
            return verdict
        ids = output if isinstance(output, list) else output.tolist()
        return check_tool_calls(verdict, ids, decode=self._decode, tools=tools, grammar=self._grammar)


def judge_file(
    path: Path, profile: str, *, tokenizer: Path | None = None, trust_remote_code: bool = False
) -> Iterator[FileVerdict | UnreadableRow]:
    """Judge one file; arguments and errors are those of ``FileJudge.of`` and ``FileJudge.judge``."""
    return FileJudge.of(profile, tokenizer=tokenizer, trust_remote_code=trust_remote_code).judge(path)


def _verdict_of(
    row: FileRow,
    file: str,
    verdict: Verdict | TextVerdict,
    positions: Mapping[str, tuple[int, ...]],
    unchecked: tuple[str, ...] | None = None,
) -> FileVerdict:
    marks = (*verdict.reasons, *verdict.flags)
    return FileVerdict(
        file=file,
        row=row.number,
        id=row.values.get("id"),
        verdict="quarantined" if verdict.reasons else "kept",
        reasons=verdict.reasons,
        flags=verdict.flags,
        positions={name: positions.get(name, ()) for name in marks},
        unchecked=verdict.unchecked if unchecked is None else unchecked,
        reasoning_tokens=verdict.reasoning_tokens,
        answer_tokens=verdict.answer_tokens,
        tool_calls=verdict.tool_calls,
    )


def _tools_of(row: FileRow) -> Mapping[str, Any] | None:
    """What the prompt declares; None where the row does not say."""
    tools = row.values.get("tools")
    if tools is None or tools == "":
        return None
    if not isinstance(tools, str | list):
        raise BadInput(f"{row.where}: expected tools to be a list of declarations, or a string of JSON")
    try:
        text = tools if isinstance(tools, str) else json.dumps(_without_nulls(tools), default=str)
        return (_cached_tools if len(text) <= CACHED_TOOLS_CHARACTERS else declared_tools)(text)
    except (BadInput, RecursionError) as error:
        raise BadInput(f"{row.where}: {error}") from error


def _without_nulls(value: Any) -> Any:
    """A declaration without its null members: a column of objects holds every key that any of them has."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
