"""Generation against real SGLang with the demo's verifier: killed twice, and nothing lost or repeated."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aerie.artefacts.previews import iterate_previews
from aerie.artefacts.response_log import iterate_responses
from aerie.generation.stage import generate
from aerie.serving import client as serving
from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.settings.pipeline import load_settings
from aerie.stages import Events, StageRequest
from aerie.store.connection import connected
from aerie.store.queries.ledger import count_ledger, read_ledger

DATASET = "B1_glaive"
KILLED_AT_ROWS = (6, 20)


@pytest.fixture
def request_file(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    path = tmp_path / "request.json"
    request = StageRequest(
        settings=settings, data_root=tmp_path, server_folder=tmp_path / "server", edition="main", dataset=DATASET,
        run_id="real",
    )  # fmt: skip
    path.write_text(request.model_dump_json())
    return path


def start(python: Path, stage: str, request: Path) -> subprocess.Popen[bytes]:
    folder = request.parent
    return subprocess.Popen(
        [
            str(python), "-m", "aerie", "stage", stage, "--request", str(request), "--result",
            str(folder / f"{stage}.json"), "--events", str(folder / "events.jsonl"),
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include")}, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_generator_killed_against_real_sglang_goes_on_without_loss_or_repetition(request_file, tmp_path):
    prepared = start(python_of("model"), "prepare", request_file)
    assert prepared.wait() == 0, prepared.stderr.read().decode()
    request = StageRequest.model_validate_json(request_file.read_bytes())
    files = request.files.dataset(DATASET)
    try:
        for rows in KILLED_AT_ROWS:
            process = start(Path(sys.executable), "generate", request_file)
            while not files.responses.exists() or files.responses.read_bytes().count(b"\n") < rows:
                assert process.poll() is None, process.stderr.read().decode()
                time.sleep(0.01)
            process.kill()
            process.communicate()
        result = generate(request, Events(tmp_path / "events.jsonl"))
    finally:
        serving.stop(request.server_folder)
    assert result.manifest is not None
    counts = result.manifest.counts
    assert counts["stopped_by"] == "budget" and counts["response_tokens"] >= request.dataset_settings.budget_tokens
    shown = list(iterate_previews(files.canary_previews))
    assert len(shown) == 3 and all(
        ("boundary", "</think>") in preview.spans for preview in shown if not preview.reasons
    )
    messages = [json.loads(line).get("message", "") for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {"Sample 1 of 3", "Sample 2 of 3", "Sample 3 of 3"} <= {message.split(":")[0] for message in messages}
    rows = list(iterate_responses(files.responses))
    assert len({row.sample_id for row in rows}) == len(rows) == counts["generated"]
    with connected(os.environ["AERIE_DATABASE_URL"]) as connection:
        ledger = read_ledger(connection, edition="main", dataset=DATASET)
        kept = count_ledger(connection, edition="main", dataset=DATASET).kept_response_tokens
    assert kept == sum(row.completion_tokens for row in rows if ledger[row.sample_id].state == "kept")
