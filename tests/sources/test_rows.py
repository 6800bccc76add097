import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from aerie.errors import BadInput
from aerie.settings.pipeline import SourceSettings
from aerie.sources import rows as rows_module
from aerie.sources.rows import iterate_source

ROWS = [{"id": str(i), "text": "é" * i, "list": [{"a": i}]} for i in range(7)]


def source(path: Path) -> SourceSettings:
    return SourceSettings(reader="ultrachat", path=path, licence="MIT")


def read(path: Path) -> list[Any]:
    return [row.value for row in iterate_source(source(path))]


def lines() -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def write(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    match path.name:
        case "a.jsonl":
            path.write_text("\n\n" + lines().replace("\n", "\n  \n", 2))
        case "a.json":
            path.write_text(json.dumps(ROWS, indent=1))
        case "lines.json":
            path.write_text(lines())
        case "a.jsonl.gz":
            path.write_bytes(gzip.compress(lines().encode()))
        case "a.json.zst":
            path.write_bytes(zstandard.compress(json.dumps(ROWS).encode()))
        case "a.parquet":
            pq.write_table(table, path)
        case "file.arrow":
            with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)
        case "stream.arrow":
            with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
                writer.write_table(table)


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.json", "lines.json", "a.jsonl.gz", "a.json.zst", "a.parquet", "file.arrow", "stream.arrow"],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)

    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_an_array_is_read_across_the_borders_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(rows_module, "CHUNK_CHARACTERS", chunk)
    write(tmp_path / "a.json")

    assert read(tmp_path / "a.json") == ROWS


def test_a_folder_of_shards_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "README.md").write_text("about")

    assert read(tmp_path) == [{"n": 1}, {"n": 2}]


def test_a_broken_line_is_one_bad_row_with_its_place_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n\n{"n": \n"text"\n{"n": "\xff"}\n{"n": 2}')

    found = [(row.where.rpartition(":")[2], row.problem and row.problem.reason) for row in iterate_source(source(path))]

    assert found == [("1", None), ("3", "not_json"), ("4", "not_an_object"), ("5", "not_utf8"), ("6", None)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'[{"n": 1}, {"n": 2}'),
        ("a.json", b'[{"n": 1}, {"n": 2'),
        ("a.json", b'[{"n": 1}, oops]'),
        ("a.parquet", b"PAR1 but not really"),
        ("a.arrow", b"neither"),
        ("a.jsonl.gz", gzip.compress(b'{"n": 1}\n' * 9)[:-9]),
        ("a.txt", b"text"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(BadInput, match=name):
        read(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no_such"):
        read(tmp_path / "no_such.jsonl")


def test_a_hub_source_streams_through_the_datasets_library(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train_sft.jsonl").write_text(lines())
    hub = SourceSettings(
        reader="ultrachat", huggingface=str(tmp_path / "data"), split="train", revision="a" * 40, licence="MIT"
    )

    assert [row.value["id"] for row in iterate_source(hub)] == [row["id"] for row in ROWS]


def test_a_hub_source_without_a_pinned_commit_is_refused() -> None:
    hub = SourceSettings(reader="ultrachat", huggingface="some/data", revision="main", licence="MIT")

    with pytest.raises(BadInput, match="main"):
        list(iterate_source(hub))
