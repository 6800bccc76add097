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


def source(path: Path, **fields: Any) -> SourceSettings:
    return SourceSettings.model_validate({"reader": "ultrachat", "path": path, "licence": "MIT"} | fields)


def read(path: Path, **fields: Any) -> list[Any]:
    return [row.value for row in iterate_source(source(path, **fields)) if row.problem is None]


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


def test_a_pattern_takes_the_shards_that_it_names(tmp_path: Path) -> None:
    for name in ("x-2", "x-1", "y-1"):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(f'{{"n": "{name}"}}\n'.encode()) * 2)

    assert [row["n"] for row in read(tmp_path / "x-*.jsonl.zst")] == ["x-1", "x-1", "x-2", "x-2"]


def test_rows_that_the_settings_leave_out_are_set_aside_by_rule(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": n, "score": str(n % 3)}) + "\n" for n in range(6)) + '{"n": 6}\n')

    assert [row["n"] for row in read(path, where={"score": ["0", "1"]})] == [0, 1, 3, 4]
    problems = [row.problem for row in iterate_source(source(path, where={"score": "0"})) if row.problem]
    assert [(problem.reason, problem.by_rule) for problem in problems] == [
        *[("filtered", True)] * 4,
        ("missing_field", False),
    ]


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
        ("a.jsonl.zst", zstandard.compress(lines().encode())[:-3]),
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


def hub_repository(folder: Path) -> None:
    """A data set as it lies on the hub: a card with a configuration of two splits, their files, and others."""
    (folder / "data").mkdir(parents=True)
    for split, rows in (("train_sft", ROWS), ("test_sft", ROWS[:1])):
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    (folder / "other.jsonl").write_text('{"id": "other"}\n')
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: train_sft, path: data/train_sft-*}\n  - {split: test_sft, path: data/test_sft-*}\n---\n"
    )


def hub(name: str, **fields: Any) -> SourceSettings:
    return source(None, huggingface=name, revision="a" * 40, **fields)  # type: ignore[arg-type]


def test_a_hub_source_streams_the_split_that_its_card_names(tmp_path: Path) -> None:
    hub_repository(tmp_path)

    rows = list(iterate_source(hub(str(tmp_path), split="train_sft")))

    assert [row.value for row in rows] == ROWS
    assert rows[3].where.endswith("@aaaaaaaaaaaa: row 3")
    with pytest.raises(BadInput, match=r"split train\)"):
        list(iterate_source(hub(str(tmp_path))))


def test_files_of_a_hub_repository_can_be_named_where_not_all_are_meant(tmp_path: Path) -> None:
    hub_repository(tmp_path)

    assert [row.value for row in iterate_source(hub(str(tmp_path), data_files=["other.jsonl"]))] == [{"id": "other"}]


def test_offline_the_pinned_revision_comes_from_the_hubs_cache_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import _snapshot_download, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(_snapshot_download.constants, "HF_HUB_CACHE", str(tmp_path))
    hub_repository(tmp_path / "datasets--some--data" / "snapshots" / ("a" * 40))

    assert [row.value for row in iterate_source(hub("some/data", split="test_sft"))] == ROWS[:1]
    with pytest.raises(BadInput, match=f"hf download --repo-type dataset --revision {'b' * 40} some/data"):
        list(iterate_source(source(None, huggingface="some/data", revision="b" * 40)))  # type: ignore[arg-type]


def test_a_hub_source_without_a_pinned_commit_is_refused() -> None:
    hub = SourceSettings(reader="ultrachat", huggingface="some/data", revision="main", licence="MIT")

    with pytest.raises(BadInput, match="main"):
        list(iterate_source(hub))
