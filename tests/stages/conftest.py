import pytest

from aerie.pipeline import RunParameters, stage_request
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings


@pytest.fixture
def settings():
    return load_settings(PROJECT_ROOT / "demo" / "config.yaml")


@pytest.fixture
def make_request(settings, tmp_path, monkeypatch):
    """A request of the demo's pipeline whose files lie in a temporary folder."""
    monkeypatch.setenv("AERIE_DATA_ROOT", str(tmp_path / "data"))

    def make(changed=settings, **arguments):
        return stage_request(changed, RunParameters(), run_id="test", **arguments)

    return make
