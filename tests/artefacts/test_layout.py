"""Names that people choose stay names: none of them leads out of the data root."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aerie.artefacts.layout import EditionFiles
from aerie.cli import app
from aerie.errors import BadInput
from aerie.pipeline import run_parameters
from aerie.quarantine import Selection
from aerie.settings.machine import PROJECT_ROOT, run_folder
from aerie.settings.pipeline import load_settings
from aerie.stages import StageRequest

NAMES_OF_ELSEWHERE = [
    "", ".", "..", "../other", "a/../../b", "/etc", "a/b", "a\\b", "a\0b", "a\n", "~", "*", "ä", "x" * 65,
]  # fmt: skip
elsewhere = pytest.mark.parametrize("name", NAMES_OF_ELSEWHERE, ids=repr)


@elsewhere
def test_an_edition_cannot_lead_out_of_the_data_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"edition .* expected at most 64 lower-case letters, digits"):
        EditionFiles(tmp_path, name)
    with pytest.raises(BadInput, match=r"edition .* expected at most 64 lower-case letters"):
        run_parameters({"edition": name}, backfill=False)


@elsewhere
def test_a_data_set_cannot_lead_out_of_its_edition(tmp_path: Path, name: str) -> None:
    files = EditionFiles(tmp_path, "main")
    for place in (files.dataset, files.lock):
        with pytest.raises(BadInput, match=r"data set .* expected at most 64 letters, digits"):
            place(name)


@elsewhere
def test_a_stage_refuses_a_request_for_what_lies_elsewhere(tmp_path: Path, name: str) -> None:
    document = {
        "settings": load_settings(PROJECT_ROOT / "demo" / "config.yaml"),
        "data_root": tmp_path, "server_folder": tmp_path, "edition": "main", "dataset": "B1_glaive", "run_id": "run",
    }  # fmt: skip
    assert StageRequest.model_validate(document).files.folder == tmp_path / "editions" / "main"
    for field in ("edition", "dataset"):
        with pytest.raises(BadInput, match="expected at most 64"):
            StageRequest.model_validate({**document, field: name})


@pytest.mark.parametrize("run_id", ["", ".", "..", "a\0b", "a\nb"])
def test_the_folder_of_a_run_is_never_that_of_all_runs_or_above(monkeypatch, tmp_path: Path, run_id: str) -> None:
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    with pytest.raises(BadInput, match="its id is no name for a folder"):
        run_folder(run_id)


@pytest.mark.parametrize("run_id", ["../../etc", "/etc/passwd", "manual__2026-11-29T17:45:12+00:00", "a of b, c"])
def test_whatever_stands_in_a_runs_id_its_folder_lies_with_the_others(monkeypatch, tmp_path: Path, run_id: str) -> None:
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    assert run_folder(run_id).resolve().parent == tmp_path.resolve() / "runs"


@pytest.mark.parametrize(
    "command",
    [
        ["quarantine", "list", "--edition", "../other"],
        ["quarantine", "list", "--dataset", "../other"],
        ["quarantine", "show", "s1", "--edition", "/etc", "--dataset", "B1_glaive"],
    ],
    ids=" ".join,
)
def test_the_command_line_takes_no_path_for_a_name(monkeypatch, tmp_path: Path, command: list[str]) -> None:
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    monkeypatch.setenv("AERIE_CONFIG", str(PROJECT_ROOT / "demo" / "config.yaml"))
    monkeypatch.delenv("AERIE_DATABASE_URL", raising=False)
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, BadInput), error
    assert "expected at most 64" in str(error)


def test_verdicts_on_disk_are_not_looked_for_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data set '../other'"):
        Selection("main", "../other", None, ()).find_in_verdicts(tmp_path)
