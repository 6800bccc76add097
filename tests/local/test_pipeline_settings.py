import os
from pathlib import Path

import pytest
import yaml

from aerie.errors import BadInput
from aerie.local.pipeline_settings import choose_settings, describe_settings, missing_verifier, remember_settings
from aerie.local.pipeline_settings import require_same_settings as require_same
from aerie.local.stack import up
from aerie.local.supervisor import SupervisorState, state_path
from aerie.local.watched_run import run_pipeline
from aerie.processes import ProcessIdentity
from aerie.settings.machine import PROJECT_ROOT, settings_path
from aerie.settings.pipeline import load_settings
from aerie.settings.presets import preset_path

DEMO = PROJECT_ROOT / "demo" / "config.yaml"
KIMI = "kimi-k25-8x96g"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which no stack was started, and no configuration in the environment."""
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    monkeypatch.delenv("AERIE_CONFIG", raising=False)
    monkeypatch.delenv("AERIE_MODELS", raising=False)
    return tmp_path


def test_the_first_configuration_is_the_demos_and_every_later_one_that_of_the_last_time() -> None:
    assert choose_settings(None) == DEMO
    remember_settings(choose_settings(KIMI))
    assert choose_settings(None) == settings_path() == preset_path(KIMI)
    remember_settings(choose_settings("demo"))
    assert choose_settings(None) == DEMO


def test_a_configuration_of_ones_own_is_remembered_as_where_it_was_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real.yaml").write_text(DEMO.read_text())
    (tmp_path / "mine.yaml").symlink_to("elsewhere/real.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AERIE_CONFIG", "mine.yaml")
    remember_settings(choose_settings(None))
    monkeypatch.delenv("AERIE_CONFIG")
    assert settings_path() == tmp_path / "mine.yaml"


def test_the_remembered_configuration_may_be_named_by_the_link_that_remembers_it(home: Path, monkeypatch) -> None:
    remember_settings(preset_path(KIMI))
    monkeypatch.setenv("AERIE_CONFIG", str(home / "config.yaml"))
    remember_settings(choose_settings(None))
    assert settings_path() == preset_path(KIMI)
    assert load_settings(home / "config.yaml").name == load_settings(preset_path(KIMI)).name


@pytest.mark.parametrize("preset", [None, "demo"])
def test_a_file_of_ones_own_in_the_place_of_the_link_is_never_replaced(home: Path, monkeypatch, preset) -> None:
    (home / "config.yaml").write_text(DEMO.read_text())
    if preset is None:
        monkeypatch.setenv("AERIE_CONFIG", str(home / "config.yaml"))
    with pytest.raises(BadInput, match=r"config\.yaml: is a file, .* move it to another folder, and set AERIE_CONFIG"):
        up(lambda _: None, preset=preset)
    assert (home / "config.yaml").read_text() == DEMO.read_text()


def test_a_preset_beside_a_configuration_in_the_environment_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("AERIE_CONFIG", "/srv/config.yaml")
    with pytest.raises(BadInput, match=f"--preset {KIMI} and AERIE_CONFIG=/srv/config.yaml: expected one of them"):
        choose_settings(KIMI)


def test_another_preset_over_a_running_stack_is_refused_with_what_to_do() -> None:
    remember_settings(preset_path(KIMI))
    require_same(preset_path(KIMI))
    with pytest.raises(BadInput, match=rf"the stack runs configuration {KIMI} .*, not demo .*\./aerie down"):
        require_same(DEMO)


def test_a_run_that_is_refused_does_not_stop_the_stack_that_runs_something_else(home: Path, monkeypatch) -> None:
    remember_settings(preset_path(KIMI))
    stack_of_someone = SupervisorState(supervisor=ProcessIdentity.of(os.getpid()), components={})
    (home / "run").mkdir()
    state_path().write_text(stack_of_someone.model_dump_json())
    stopped: list[bool] = []
    monkeypatch.setattr("aerie.local.stack.down", lambda *_, **__: stopped.append(True))
    with pytest.raises(BadInput, match="the stack runs configuration"):
        run_pipeline(lambda _: None, {}, once=True, summary_path=None, preset="demo")
    assert stopped == []


def test_a_wrong_configuration_starts_nothing(home: Path, tmp_path: Path, monkeypatch) -> None:
    document = yaml.safe_load(DEMO.read_text())
    del document["verifier"]["profile"]
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("AERIE_CONFIG", str(tmp_path / "wrong.yaml"))
    with pytest.raises(BadInput, match=r"verifier\.profile: Field required"):
        up(lambda _: None)
    assert not (home / "stack.json").exists()
    assert settings_path() == tmp_path / "wrong.yaml"
    monkeypatch.delenv("AERIE_CONFIG")
    assert settings_path() == DEMO, "a configuration that never ran was remembered"


def test_a_missing_verifier_is_told_with_the_command_that_gets_it(home: Path) -> None:
    (line,) = missing_verifier(load_settings(preset_path(KIMI)).verifier)
    assert line == (
        f"the verifier is not here: {home}/models/Kimi-K2.5: there is no such folder; get moonshotai/Kimi-K2.5 with "
        "./aerie fetch-model"
    )
    assert list(missing_verifier(load_settings(DEMO).verifier)) == []


def test_a_preset_is_called_by_its_name_and_anything_else_by_its_path() -> None:
    assert describe_settings(DEMO) == f"demo ({DEMO})"
    assert describe_settings(Path("/srv/config.yaml")) == "/srv/config.yaml"
