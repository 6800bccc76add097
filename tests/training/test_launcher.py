import contextlib
import logging
import os
import signal
from types import SimpleNamespace

import pytest
from speculators.train import graceful_shutdown, trainer

from aerie.training import launcher


def test_another_version_of_speculators_is_refused_with_both_versions(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.10.0")
    with pytest.raises(SystemExit) as ended:
        launcher.main(["--config", "run.yaml"])
    assert ended.value.code == 2
    assert "written for speculators 0.9.0, found 0.10.0" in capsys.readouterr().err


def test_torchrun_is_refused_because_its_processes_must_be_freed_at_once(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        launcher.main([])
    assert "started by torchrun" in capsys.readouterr().err


class Training:
    """A training of two batches; ``during_batch`` and ``during_save`` run inside them."""

    def __init__(self, during_batch, during_save=lambda: None):
        self.during_batch, self.during_save = during_batch, during_save
        self.checkpointer = SimpleNamespace(path=None)
        self.batches_finished, self.saved = 0, 0

    def maybe_save_checkpoint(self, _label):
        self.during_save()
        self.saved += 1

    def run(self):
        recovery = trainer.BatchRecoveryCoordinator("training")
        for _ in range(2):
            recovery.consume({})
            self.during_batch()
            self.batches_finished += 1


@pytest.fixture
def interruptible(monkeypatch):
    """What ``interrupt_between_batches`` replaces, put back afterwards."""
    monkeypatch.setattr(graceful_shutdown, "GracefulShutdownHandler", graceful_shutdown.GracefulShutdownHandler)
    monkeypatch.setattr(trainer, "BatchRecoveryCoordinator", trainer.BatchRecoveryCoordinator)
    monkeypatch.setattr(graceful_shutdown.logger, "info", lambda *_: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    launcher.interrupt_between_batches()
    Training.run_training = graceful_shutdown.with_graceful_shutdown()(Training.run)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def end_me():
    os.kill(os.getpid(), signal.SIGTERM)


def log_while_told_to_end():
    class Handler(logging.Handler):
        def emit(self, record):
            try:
                end_me()
            except Exception:  # noqa: BLE001 - as every handler of logging does
                self.handleError(record)

    log = logging.Logger("metrics")
    log.addHandler(Handler())
    log.info("step 1")


def swallow_everything():
    with contextlib.suppress(BaseException):
        end_me()


@pytest.mark.parametrize("during_batch", [end_me, log_while_told_to_end, swallow_everything])
@pytest.mark.usefixtures("interruptible")
def test_a_signal_inside_a_batch_saves_whole_steps_wherever_it_finds_the_program(during_batch):
    training = Training(during_batch)
    training.run_training()
    assert (training.batches_finished, training.saved) == (1, 1)


@pytest.mark.usefixtures("interruptible")
def test_a_second_signal_while_the_state_is_saved_does_not_cut_the_save_off():
    training = Training(end_me, during_save=end_me)
    training.run_training()
    assert training.saved == 1
