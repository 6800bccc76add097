"""``speculators train`` in one process, which ends between two batches when it is told to, and runs without a GPU.

``python -m aerie.training.launcher --config run.yaml`` takes the arguments of ``speculators train``.

speculators 0.9.0 raises its interruption wherever the signal finds the program. Inside a log call the exception is
printed and dropped, and the training goes on deaf; inside functorch it turns into another error and nothing is saved;
inside the optimizer the saved weights are of two steps at once. ``interrupt_between_batches`` raises it where a batch
begins. Under torchrun speculators runs unchanged: there an immediate exception is what frees a stuck collective.

It knows the back end of streamed states (``aerie.training.streamed_states``).

speculators also takes an accelerator for granted in four places; ``adapt_to_cpu`` says which, and why each is changed.
Three more needs of a CPU are plain settings of speculators, which ``aerie.training.configuration`` sets:
``draft_attn_impl: sdpa`` (flex attention has no CPU backward), ``loss_implementation: eager`` (the fused losses are
Triton kernels) and ``hidden_states_dtype: float32``. The rest of the trainer is untouched.
"""

import importlib.metadata
import os
import signal
import sys
from types import FrameType
from typing import Any

import torch

from aerie.training.streamed_states import save_where_states_end

WRITTEN_FOR = "0.9.0"
SIGNAL_HEARD = b"\nAerie: signal heard, interrupting training to save checkpoint after this batch\n"


def problem_here() -> str | None:
    """Why the adaptations must not be applied here, or None."""
    version = importlib.metadata.version("speculators")
    if version != WRITTEN_FOR:
        return f"written for speculators {WRITTEN_FOR}, found {version}: check each adaptation against its source"
    if "LOCAL_RANK" in os.environ:
        return "started by torchrun: start `-m speculators.train` there, and this module as a single process"
    return None


def interrupt_between_batches() -> None:
    """Let SIGTERM and SIGINT interrupt the trainer where a batch begins, and nowhere else."""
    from speculators.train import graceful_shutdown, trainer

    told_to_end: list[int] = []

    class Handler(graceful_shutdown.GracefulShutdownHandler):  # type: ignore[misc]
        def _handler(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
            if os.getpid() != self._owner_pid:
                return
            if not told_to_end:
                os.write(sys.stderr.fileno(), SIGNAL_HEARD)  # logging is not safe inside a signal handler
            told_to_end.append(signum)

        def restore(self) -> None:
            """Leave the handler in place until the process ends: a repeated signal must not cut off the save."""

    class Batches(trainer.BatchRecoveryCoordinator):  # type: ignore[misc]
        def consume(self, batch: dict[str, Any], *, synchronize: bool = False) -> None:
            if told_to_end:
                raise graceful_shutdown.TrainingInterruptedError(signal.Signals(told_to_end[0]).name)
            super().consume(batch, synchronize=synchronize)

    graceful_shutdown.GracefulShutdownHandler = Handler
    trainer.BatchRecoveryCoordinator = Batches


def adapt_to_cpu() -> None:
    """Replace what speculators' trainer assumes of an accelerator. The process is the trainer's alone."""
    from speculators.train import checkpointer, cli, distributed, trainer

    # 1. Model and batches move `.to(local_rank)`, an integer that torch reads as the index of an accelerator.
    #    `maybe_setup_distributed` would set it back to 0; without torchrun it does nothing else.
    distributed._local_rank = torch.device("cpu")
    cli.maybe_setup_distributed = lambda: None

    # 2. Autocast falls back to "cuda" where there is no accelerator.
    original = trainer.Trainer.__init__

    def with_cpu_autocast(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.device_type = "cpu"

    trainer.Trainer.__init__ = with_cpu_autocast

    # 3. The step timer synchronises the accelerator before every reading.
    torch.accelerator.synchronize = lambda *_args, **_kwargs: None

    # 4. A resumed run loads model and optimizer onto "cuda:0".
    checkpointer.get_current_device = lambda: "cpu"


def main(arguments: list[str]) -> None:
    """Run ``speculators train`` with these arguments; exit code 2 when it would not be right to."""
    problem = problem_here()
    if problem is not None:
        print(f"aerie.training.launcher: {problem}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    save_where_states_end()
    interrupt_between_batches()
    if not torch.accelerator.is_available():
        adapt_to_cpu()
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    train(TrainConfig.resolve(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
