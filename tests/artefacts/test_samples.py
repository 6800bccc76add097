from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aerie.artefacts.previews import Preview, iterate_previews, write_previews
from aerie.artefacts.prompts import write_prompts
from aerie.artefacts.samples import (
    SAMPLE_SCHEMA,
    Sample,
    VerdictRow,
    count_tokens,
    find_sample,
    iterate_sample_batches,
    iterate_samples,
    iterate_verdicts,
    sample_writer,
    write_samples,
    write_verdicts,
)
from aerie.errors import BadInput


def sample(number: int) -> Sample:
    return Sample(
        sample_id=f"s{number}",
        conversation_id=f"c{number}",
        dataset="B1_glaive",
        split="train",
        input_ids=[1, 2, 163_607, number],
        loss_mask=[0, 0, 1, 1],
        prompt_tokens=2,
        response_tokens=2,
        reasoning_tokens=0,
        flags=["repetition"],
        source_revision=None,
        edition="main",
        licence="MIT",
    )


def test_samples_come_back_as_written_over_several_row_groups(tmp_path: Path) -> None:
    written = [sample(i) for i in range(2500)]
    assert write_samples(tmp_path / "samples.parquet", written) == 2500
    assert list(iterate_samples(tmp_path / "samples.parquet")) == written
    batches = list(iterate_sample_batches(tmp_path / "samples.parquet"))
    assert sum(batch.num_rows for batch in batches) == 2500
    assert count_tokens(tmp_path / "samples.parquet") == 10_000


def test_arrays_are_stored_as_the_same_numbers_as_lists(tmp_path: Path) -> None:
    listed = sample(7)
    arrays = Sample(
        **{**vars(listed), "input_ids": np.array(listed.input_ids), "loss_mask": np.array(listed.loss_mask)}
    )
    write_samples(tmp_path / "samples.parquet", [arrays])
    assert list(iterate_samples(tmp_path / "samples.parquet")) == [listed]


def test_samples_written_before_their_lists_were_declared_without_nulls_are_read(tmp_path: Path) -> None:
    earlier = pa.schema(
        [
            pa.field(
                field.name,
                pa.list_(field.type.value_type) if pa.types.is_list(field.type) else field.type,
                field.nullable,
            )
            for field in SAMPLE_SCHEMA
        ]
    )
    assert not earlier.equals(SAMPLE_SCHEMA)
    path, written = tmp_path / "samples.parquet", [sample(1), sample(2)]
    pq.write_table(pa.Table.from_pylist([vars(row) for row in written], schema=earlier), path)
    assert list(iterate_samples(path)) == written
    assert find_sample(path, "s2") == (1, written[1])
    assert count_tokens(path) == 8
    (batch,) = iterate_sample_batches(path)
    assert batch.column("input_ids").values.to_pylist() == [1, 2, 163_607, 1, 1, 2, 163_607, 2]


def test_interrupted_writer_leaves_the_earlier_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    write_samples(path, [sample(1)])
    with pytest.raises(RuntimeError), sample_writer(path) as writer:
        writer.write(sample(2))
        raise RuntimeError
    assert [row.sample_id for row in iterate_samples(path)] == ["s1"]
    assert [p.name for p in tmp_path.iterdir()] == ["samples.parquet"]


def test_verdicts_keep_their_positions(tmp_path: Path) -> None:
    row = VerdictRow("s", "quarantined", ["loop"], ["repetition"], {"loop": [3, 9], "repetition": []}, 4, 10, 2, 3, 0)
    write_verdicts(tmp_path / "verdicts.parquet", [row])
    assert list(iterate_verdicts(tmp_path / "verdicts.parquet")) == [row]


def test_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    write_prompts(path, [])
    for read in (iterate_samples, iterate_verdicts, iterate_sample_batches):
        with pytest.raises(BadInput, match=r"samples\.parquet"):
            list(read(path))
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(BadInput, match="damaged"):
        count_tokens(path)


def test_previews_come_back_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "previews.jsonl"
    preview = Preview(
        sample_id="s",
        conversation_id="c",
        split="train",
        verdict="quarantined",
        reasons=("no_close",),
        flags=(),
        positions={"no_close": (4,)},
        prompt_tokens=3,
        response_tokens=5,
        reasoning_tokens=4,
        spans=(("prompt", "é<think>"), ("reasoning", "first line\nsecond")),
    )
    assert write_previews(path, [preview]) == 1
    assert list(iterate_previews(path)) == [preview]
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(BadInput, match="line 2"):
        list(iterate_previews(path))
