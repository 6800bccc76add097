"""A small world to generate in: prompts on disk, a database, and a server that can be told to fail."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aerie.alerting import INFORMATION
from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.manifest import Manifest, write_manifest
from aerie.artefacts.previews import Preview
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.response_log import Response
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.generation import canary_show, stage
from aerie.generation.server import Server
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest, StageResult
from aerie.store.connection import connected
from aerie.store.queries.ledger import LedgerCounts, LedgerRow, count_ledger, read_ledger
from aerie.store.queries.runs import read_edition

from .fake_server import TOKEN_IDS, VOCABULARY_SIZE, FakeServer

DATASET = "B1_glaive"


def make_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(
            sample_id=f"s{number}", conversation_id=f"c{number}", turn=0, split="train",
            prompt_ids=[1 + number % 800, 5, 6, TOKEN_IDS["<|im_middle|>"], TOKEN_IDS["<think>"]], tools=None,
            admission_rank=number, skip_reason=None,
        )
        for number in range(count)
    ]  # fmt: skip


def write_dataset(files: DatasetFiles, prompts: list[Prompt]) -> None:
    write_prompts(files.prompts, prompts)
    tokens = VerifierTokens(
        token_ids=TOKEN_IDS, vocabulary_size=VOCABULARY_SIZE, eos_ids=(TOKEN_IDS["<|im_end|>"],),
        tokenizer_sha256="t", model_type="llama",
    )  # fmt: skip
    write_verifier_tokens(files.verifier_tokens, tokens)
    write_manifest(
        files.manifest("prepare"), stage="prepare", edition="main", dataset=DATASET, fingerprint="p", inputs=(),
        outputs=(), counts={},
    )  # fmt: skip


def write_weights(folder: Path, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)


def make_settings(root: Path, dataset: dict[str, Any], generation: dict[str, Any]) -> PipelineSettings:
    given: dict[str, Any] = {
        "name": "test",
        "verifier": {"path": root / "verifier", "profile": "demo", "dtype": "float32"},
        "serving": {"device": "cpu", "context_length": 1024},
        "datasets": {
            DATASET: {
                "source": {"reader": "glaive", "path": root / "source.jsonl", "licence": "apache-2.0"},
                "budget_tokens": 0, "concurrency": 8, "max_new_tokens": 256,
                "canary": {"prompts": 4}, **dataset,
            }
        },
        "generation": {"progress_seconds": 0.2, **generation},
        "corpus": {"maximum_length": 1024},
        "vocabulary": {"size": 100},
        "training": {"epochs": 1, "sequence_length": 1024},
        "publish": {"folder": root / "published"},
    }  # fmt: skip
    return PipelineSettings.model_validate(given)


@dataclass
class World:
    """One data set, one database, one server; ``run`` is one try of the stage."""

    root: Path
    database_url: str
    server: FakeServer

    @property
    def files(self) -> DatasetFiles:
        return self.request().files.dataset(DATASET)

    def request(self, *, force: bool = False, generation: dict[str, Any] | None = None, **dataset: Any) -> StageRequest:
        return StageRequest(
            settings=make_settings(self.root, dataset, generation or {}), data_root=self.root,
            server_folder=self.root / "server", edition="main", dataset=DATASET, run_id="run-1", force=force,
        )  # fmt: skip

    def run(self, **changes: Any) -> StageResult:
        return stage.generate(self.request(**changes), Events(self.root / "events.jsonl"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.root / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    def warnings(self) -> list[dict[str, Any]]:
        """Alerts of what went wrong; a budget that was reached is told of, too, and is good news."""
        return [alert for alert in self.events("alert") if alert["reason"] not in INFORMATION]

    def ledger(self) -> dict[str, LedgerRow]:
        with connected(self.database_url) as connection:
            return read_ledger(connection, edition="main", dataset=DATASET)

    def counts(self) -> LedgerCounts:
        with connected(self.database_url) as connection:
            return count_ledger(connection, edition="main", dataset=DATASET)

    def edition(self) -> dict[str, Any]:
        with connected(self.database_url) as connection:
            return read_edition(connection, edition="main", dataset=DATASET) or {}

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.responses.read_text().splitlines()]

    def check_log_equals_ledger(self) -> None:
        """Every prompt in one state, no sample twice, and the same kept tokens in log and ledger."""
        rows, log = self.ledger(), self.log()
        ids = [row["sample_id"] for row in log]
        assert len(ids) == len(set(ids)), "a sample was logged twice"
        assert set(ids) == {row.sample_id for row in rows.values() if row.state in ("kept", "quarantined")}
        tokens = {row["sample_id"]: len(row["output_ids"]) for row in log}
        assert all(rows[sample_id].completion_tokens == count for sample_id, count in tokens.items())
        counts = self.counts()
        assert counts.generated_tokens == sum(tokens.values())
        states = counts.pending + counts.in_flight + counts.kept + counts.quarantined + counts.skipped + counts.failed
        assert states == counts.prompts


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Forty prompts and a healthy server."""
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    with FakeServer(str(tmp_path / "verifier")) as server:
        made = World(tmp_path, database_url, server)
        write_weights(tmp_path / "verifier", b"weights")
        write_dataset(made.files, make_prompts(40))
        monkeypatch.setattr(stage, "_ensure_server", ensure(server.url))
        monkeypatch.setattr(canary_show, "decode", decode_without_tokenizer)
        yield made


async def decode_without_tokenizer(request: StageRequest, responses: Sequence[Response]) -> list[Preview]:
    """Stands in for the step in the model environment, which takes seconds and a real checkpoint."""
    return [
        Preview(
            sample_id=row.sample_id, conversation_id="c", split="train", verdict="kept", reasons=(), flags=(),
            positions={}, prompt_tokens=row.prompt_tokens, response_tokens=row.completion_tokens, reasoning_tokens=0,
            spans=(("answer", f"{row.output_ids}"),),
        )
        for row in responses
    ]  # fmt: skip


def ensure(url: str) -> Callable[[StageRequest, Events], Server]:
    """Stands in for the keeper: the server runs already."""
    return lambda request, events: Server(url, "launch-1", lambda: None)


def manifest_of(result: StageResult) -> Manifest:
    assert result.manifest is not None
    return result.manifest
