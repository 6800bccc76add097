from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from aerie.artefacts.files import sha256_of
from aerie.artefacts.imported import ImportedRow, iterate_imported
from aerie.errors import BadInput
from aerie.prompts.stage import import_tokenised, prepare
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest, StageResult

from .conftest import VOCABULARY_SIZE, write_lines

ROWS = [{"id": f"r-{i}", "input_ids": [7, 8, i], "loss_mask": [0, 1, 1]} for i in range(20)]


class Stage:
    def __init__(
        self,
        tmp_path: Path,
        checkpoint: Path,
        settings_for: Callable[..., PipelineSettings],
        request_for: Callable[..., StageRequest],
        events: Events,
    ) -> None:
        self.path = tmp_path / "rows.jsonl"
        self.sidecar = tmp_path / "rows.meta.yaml"
        self.provenance = {
            "tokenizer_sha256": sha256_of(checkpoint / "tokenizer.json"),
            "model": "m",
            "thinking": True,
            "licence": "MIT",
            "source": "s",
        }
        self._settings_for, self._request_for, self._events = settings_for, request_for, events

    def run(
        self,
        rows: list[Any] | None = None,
        *,
        sidecar: dict[str, Any] | None = None,
        decontaminate: tuple[Path, ...] = (),
        **source: Any,
    ) -> StageResult:
        if rows is not None:
            write_lines(self.path, rows)
        if sidecar is not None:
            self.sidecar.write_text(yaml.safe_dump(self.provenance | sidecar))
        described = {"reader": "tokenised", "path": self.path, "licence": "MIT"} | source
        settings = self._settings_for({"A1": {"kind": "tokenised", "source": described}}, decontaminate=decontaminate)
        self.request = self._request_for(settings, "A1")
        return import_tokenised(self.request, self._events)

    @property
    def imported(self) -> list[ImportedRow]:
        return list(iterate_imported(self.request.files.dataset("A1").imported))


@pytest.fixture
def stage(
    tmp_path: Path,
    checkpoint: Path,
    settings_for: Callable[..., PipelineSettings],
    request_for: Callable[..., StageRequest],
    events: Events,
) -> Stage:
    return Stage(tmp_path, checkpoint, settings_for, request_for, events)


def test_rows_come_through_unchanged_with_ids_and_splits(stage: Stage) -> None:
    result = stage.run(ROWS, sidecar={})

    assert [(row.input_ids, row.loss_mask) for row in stage.imported] == [
        (row["input_ids"], row["loss_mask"]) for row in ROWS
    ]
    assert [row.sample_id for row in stage.imported] == [f"A1-r-{i}-t0" for i in range(20)]
    assert all(row.conversation_id == row.sample_id for row in stage.imported)
    assert result.manifest is not None
    assert result.manifest.counts["tokens"] == 60
    assert result.manifest.counts["trained_tokens"] == 40
    assert result.manifest.counts["provenance"]["model"] == "m"
    assert stage.request.files.dataset("A1").verifier_tokens.is_file()
    assert stage.run().reused is True


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_parquet_of_either_integer_type_is_taken(stage: Stage, tmp_path: Path, ids: str) -> None:
    stage.path = tmp_path / "rows.parquet"
    integers = pa.list_(pa.int32() if ids == "int32" else pa.int64())
    schema = pa.schema([("id", pa.string()), ("input_ids", integers), ("loss_mask", integers)])
    pq.write_table(pa.Table.from_pylist(ROWS, schema), stage.path)

    stage.run(sidecar={})

    assert len(stage.imported) == 20


def test_ids_of_another_tokenizer_are_refused(stage: Stage) -> None:
    with pytest.raises(BadInput, match=r"rows\.meta\.yaml: tokenizer_sha256 0{64}"):
        stage.run(ROWS, sidecar={"tokenizer_sha256": "0" * 64})


def test_a_licence_that_differs_from_the_settings_is_refused(stage: Stage) -> None:
    with pytest.raises(BadInput, match="licence"):
        stage.run(ROWS, sidecar={"licence": "GPL-3.0"})


def test_a_file_without_provenance_needs_permission_by_name(stage: Stage, told: Callable[[str], list[str]]) -> None:
    with pytest.raises(BadInput, match="allow_unknown_provenance"):
        stage.run(ROWS)

    result = stage.run(allow_unknown_provenance=True)

    assert result.manifest is not None
    assert result.manifest.counts["provenance"] == "unknown"
    assert len(told("alert")) == 1


def test_rows_made_without_thinking_are_reported(stage: Stage, told: Callable[[str], list[str]]) -> None:
    stage.run(ROWS, sidecar={"thinking": False})

    assert "thinking is False" in told("alert")[0]


def test_bad_rows_are_counted_with_file_and_row_and_the_rest_is_taken(stage: Stage) -> None:
    bad = [
        {"id": "x", "input_ids": [1, 2], "loss_mask": [1]},
        {"id": "y", "input_ids": [1, VOCABULARY_SIZE], "loss_mask": [0, 1]},
        {"id": "z", "input_ids": [1, 2], "loss_mask": [0, 0]},
    ]

    manifest = stage.run(ROWS + bad, sidecar={}).manifest

    assert manifest is not None
    assert manifest.counts["skipped"] == {"length_mismatch": 1, "id_outside_vocabulary": 1, "mask_all_zero": 1}
    assert manifest.counts["skipped_examples"]["mask_all_zero"][0].startswith(f"{stage.path}:23: mask_all_zero")
    assert manifest.counts["imported"] == 20

    with pytest.raises(BadInput, match=r"most common reason is length_mismatch"):
        stage.run([*bad, bad[0]], sidecar={})


def test_equal_rows_are_taken_once_and_a_shared_id_identifies_none(stage: Stage) -> None:
    other = {"id": "r-0", "input_ids": [1, 2], "loss_mask": [0, 1]}

    stage.run([*ROWS, ROWS[3], other], sidecar={})

    ids = [row.sample_id for row in stage.imported]
    assert len(ids) == len(set(ids)) == 21
    assert "A1-r-0-t0" not in ids
    assert "A1-r-3-t0" in ids


def test_rows_of_one_conversation_share_their_split(stage: Stage) -> None:
    stage.run([row | {"conversation_id": "one"} for row in ROWS], sidecar={})

    assert {row.conversation_id for row in stage.imported} == {"one"}
    assert len({row.split for row in stage.imported}) == 1


def test_a_data_set_given_to_the_wrong_stage_is_told_which_is_right(stage: Stage, events: Events) -> None:
    stage.run(ROWS, sidecar={})

    with pytest.raises(BadInput, match="stage is import"):
        prepare(stage.request, events)


def test_rows_that_ask_what_a_named_benchmark_asks_are_left_out(stage: Stage, tmp_path: Path, checkpoint: Path) -> None:
    question = "A train leaves the station at noon and travels at sixty miles per hour toward the next town."
    encode = AutoTokenizer.from_pretrained(checkpoint).encode
    asked, other = (encode(f"Solve this: {text}", add_special_tokens=False) for text in (question, question[:40]))
    rows = [
        {"id": "asked", "input_ids": [*asked, 7], "loss_mask": [0] * len(asked) + [1]},
        {"id": "other", "input_ids": [*other, 7], "loss_mask": [0] * len(other) + [1]},
        {"id": "answered", "input_ids": [7, *asked], "loss_mask": [0] + [1] * len(asked)},
    ]
    named = write_lines(tmp_path / "benchmark.jsonl", [{"prompt": question}])

    result = stage.run(rows, sidecar={}, decontaminate=(named,))

    assert [row.sample_id for row in stage.imported] == ["A1-other-t0", "A1-answered-t0"]
    assert result.manifest is not None
    assert result.manifest.counts["set_aside"] == {"contaminated": 1, "duplicate": 0}
    assert stage.run(decontaminate=(named,)).reused is True
    assert stage.run().reused is False
