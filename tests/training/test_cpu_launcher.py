import pytest
import torch

from aerie.training import cpu_launcher


def test_another_version_of_speculators_is_refused_with_both_versions(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.10.0")
    with pytest.raises(SystemExit) as ended:
        cpu_launcher.main(["--config", "run.yaml"])
    assert ended.value.code == 2
    assert "written for speculators 0.9.0, found 0.10.0" in capsys.readouterr().err


def test_a_machine_with_an_accelerator_is_told_to_run_speculators_unchanged(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        cpu_launcher.main([])
    assert "run `speculators train` unchanged" in capsys.readouterr().err


def test_torchrun_without_accelerators_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        cpu_launcher.main([])
    assert "without torchrun" in capsys.readouterr().err
