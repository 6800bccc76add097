"""Which files the dashboard reads for a URL's edition and data set."""

from pathlib import Path

import pytest
from fastapi import HTTPException

from aerie.artefacts.layout import EditionFiles
from aerie_dashboard.response_files import response_log_of


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "data"
    monkeypatch.setenv("AERIE_DATA_ROOT", str(root))
    EditionFiles(root, "main").dataset("B1_glaive").folder.mkdir(parents=True)
    return root


def test_the_log_of_a_data_set_is_that_below_the_data_root(root: Path) -> None:
    assert response_log_of("main", "B1_glaive") == EditionFiles(root, "main").dataset("B1_glaive").responses


@pytest.mark.parametrize(
    ("edition", "dataset"), [("..", "B1_glaive"), ("main", ".."), ("main", "a\0b"), ("main", "../../main")]
)
def test_a_name_that_could_lead_elsewhere_is_not_found(root: Path, edition: str, dataset: str) -> None:
    with pytest.raises(HTTPException, match=r"404: .*expected at most 64"):
        response_log_of(edition, dataset)


@pytest.mark.parametrize("name", ["responses.jsonl", "responses.0001.jsonl.gz"])
def test_a_link_out_of_the_data_root_is_not_followed(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("of someone else")
    (EditionFiles(root, "main").dataset("B1_glaive").folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(HTTPException, match=r"404: .*not below the data root"):
        response_log_of("main", "B1_glaive")


def test_a_linked_folder_of_an_edition_is_not_followed_out_of_the_data_root(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "editions" / "other").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HTTPException, match=r"404: .*not below the data root"):
        response_log_of("other", "B1_glaive")


def test_a_data_root_that_is_a_link_itself_is_read(root: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("AERIE_DATA_ROOT", str(tmp_path / "link"))
    assert response_log_of("main", "B1_glaive").is_relative_to(root)
