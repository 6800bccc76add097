from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aerie.artefacts.imported import ImportedRow, iterate_imported, write_imported
from aerie.artefacts.parquet import ROWS_PER_GROUP
from aerie.artefacts.prompts import Prompt, iterate_prompt_tokens, iterate_prompts, read_prompts, write_prompts
from aerie.artefacts.verifier_tokens import VerifierTokens, read_verifier_tokens, write_verifier_tokens
from aerie.errors import BadInput

PROMPT = Prompt(
    sample_id="B1-x-t0",
    conversation_id="x",
    turn=0,
    split="train",
    prompt_ids=[5, 163_839],
    tools='[{"type": "function"}]',
    admission_rank=2**63 - 1,
    skip_reason=None,
)


def test_prompts_come_back_as_they_were_written_across_row_groups(tmp_path: Path) -> None:
    skipped = replace(PROMPT, sample_id="B1-y-t0", prompt_ids=[], tools=None, skip_reason="prompt_too_long")
    prompts = [PROMPT, skipped] * ROWS_PER_GROUP

    assert write_prompts(tmp_path / "prompts.parquet", prompts) == 2 * ROWS_PER_GROUP
    assert read_prompts(tmp_path / "prompts.parquet") == prompts
    fields = ("sample_id", "split", "admission_rank", "skip_reason")
    assert [(*row[:-1], list(row.prompt_ids)) for row in iterate_prompt_tokens(tmp_path / "prompts.parquet")] == [
        (*(getattr(prompt, field) for field in fields), prompt.prompt_ids) for prompt in prompts
    ]


def test_imported_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    row = ImportedRow("A1-0", "A1-0", "validation", [1, 2, 3], [0, 1, 1])

    write_imported(tmp_path / "imported.parquet", [row])

    assert list(iterate_imported(tmp_path / "imported.parquet")) == [row]


def test_a_failure_while_writing_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    write_prompts(path, [PROMPT])

    def failing():
        yield replace(PROMPT, turn=1)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        write_prompts(path, failing())

    assert read_prompts(path) == [PROMPT]
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.parquet"]


@pytest.mark.parametrize("content", ["missing", "other columns", "not parquet", "cut short"])
def test_a_file_that_is_not_of_the_format_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.parquet"
    if content == "other columns":
        pq.write_table(pa.table({"sample_id": ["x"]}), path)
    elif content == "not parquet":
        path.write_text("{}")
    elif content == "cut short":
        write_prompts(path, [PROMPT])
        path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(BadInput, match=r"prompts\.parquet"):
        list(iterate_prompts(path))


def test_token_ids_of_the_verifier_come_back_as_they_were_written(tmp_path: Path) -> None:
    tokens = VerifierTokens(
        token_ids={"</think>": 1016},
        vocabulary_size=1024,
        eos_ids=(1008, 1010),
        tokenizer_sha256="ab" * 32,
        model_type="llama",
        whitespace_ids=(220,),
    )
    write_verifier_tokens(tmp_path / "verifier.json", tokens)

    assert read_verifier_tokens(tmp_path / "verifier.json") == tokens
    with pytest.raises(BadInput, match="prepare"):
        read_verifier_tokens(tmp_path / "other.json")
