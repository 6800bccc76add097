import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aerie.settings import profile as profile_module
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest

CHECKPOINT = Path(__file__).parents[2] / "demo" / "tiny_verifier"
PARTS_WITHOUT_WEIGHTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY_SIZE = 1024


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The demo's verifier without its weights, to change at will."""
    folder = tmp_path / "verifier"
    folder.mkdir()
    for name in PARTS_WITHOUT_WEIGHTS:
        shutil.copy(CHECKPOINT / name, folder / name)
    config = {"model_type": "llama", "vocab_size": VOCABULARY_SIZE, "eos_token_id": 1010}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def use_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace fields of the demo's profile."""
    import yaml

    document = yaml.safe_load((profile_module.PROFILES_FOLDER / "demo.yaml").read_text())

    def change(**fields: Any) -> None:
        folder = tmp_path / "profiles"
        folder.mkdir(exist_ok=True)
        (folder / "demo.yaml").write_text(yaml.safe_dump(document | fields))
        monkeypatch.setattr(profile_module, "PROFILES_FOLDER", folder)

    return change


@pytest.fixture
def settings_for(checkpoint: Path) -> Callable[..., PipelineSettings]:
    """Settings with the given data sets, the demo's verifier, and a context of 256 tokens."""

    def make(datasets: Mapping[str, Any], **fields: Any) -> PipelineSettings:
        document: dict[str, Any] = {
            "name": "test",
            "seed": 3,
            "verifier": {"path": checkpoint, "profile": "demo"},
            "serving": {"context_length": 256},
            "splits": {"validation": 0.2, "benchmark": 0.2},
            "datasets": datasets,
            "corpus": {"maximum_length": 256},
            "vocabulary": {"size": 128},
            "training": {"epochs": 1, "sequence_length": 256},
            "publish": {"folder": "unused"},
        }
        return PipelineSettings.model_validate(document | fields)

    return make


@pytest.fixture
def request_for(tmp_path: Path) -> Callable[..., StageRequest]:
    def make(settings: PipelineSettings, dataset: str, **fields: Any) -> StageRequest:
        document: dict[str, Any] = {
            "settings": settings,
            "data_root": tmp_path / "data",
            "server_folder": tmp_path / "server",
            "edition": "main",
            "dataset": dataset,
            "run_id": "test",
        }
        return StageRequest(**(document | fields))

    return make


@pytest.fixture
def events(tmp_path: Path) -> Events:
    return Events(tmp_path / "events.jsonl")


@pytest.fixture
def told(tmp_path: Path) -> Callable[[str], list[str]]:
    """Messages of the events of one type so far."""

    def messages(kind: str) -> list[str]:
        lines = (tmp_path / "events.jsonl").read_text().splitlines()
        return [event["message"] for event in map(json.loads, lines) if event["type"] == kind]

    return messages


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
