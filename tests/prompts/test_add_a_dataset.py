"""docs/add-a-dataset.md, followed to the letter."""

import re
from collections.abc import Callable
from pathlib import Path

import yaml

from aerie.artefacts.prompts import read_prompts
from aerie.prompts.stage import prepare
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.stages import Events, StageRequest

DOCUMENT = (PROJECT_ROOT / "docs" / "add-a-dataset.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found
    return found[1]


def test_the_documented_data_set_becomes_prompts(
    tmp_path: Path, checkpoint: Path, request_for: Callable[..., StageRequest], events: Events
) -> None:
    demo = yaml.safe_load((PROJECT_ROOT / "demo" / "config.yaml").read_text())
    demo["verifier"]["path"] = str(checkpoint)
    demo["datasets"] = yaml.safe_load(block("yaml"))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(demo))
    (tmp_path / "mine.jsonl").write_text(block("json"))

    request = request_for(load_settings(tmp_path / "config.yaml"), "C1_mine")
    manifest = prepare(request, events).manifest

    assert manifest is not None
    assert manifest.counts["set_aside"]["filtered"] == 1
    (prompt,) = read_prompts(request.files.dataset("C1_mine").prompts)
    assert prompt.skip_reason is None
    assert prompt.sample_id.startswith("C1_mine-")


def test_it_takes_no_more_than_ten_lines() -> None:
    assert len(block("yaml").splitlines()) <= 10
