"""``speculators train`` on a machine without an accelerator.

``python -m aerie.training.cpu_launcher --config run.yaml`` takes the arguments of ``speculators train``.

speculators 0.9.0 takes an accelerator for granted in four places; ``adapt`` says which, and why each is changed. The
rest of the trainer is untouched. Three more needs of a CPU are plain settings of speculators, which
``aerie.training.configuration`` sets: ``draft_attn_impl: sdpa`` (flex attention has no CPU backward),
``loss_implementation: eager`` (the fused losses are Triton kernels) and ``hidden_states_dtype: float32``.

With an accelerator run ``speculators train`` (or ``torchrun -m speculators.train``): this module refuses to.
"""

import importlib.metadata
import os
import sys
from typing import Any

import torch

WRITTEN_FOR = "0.9.0"


def problem_here() -> str | None:
    """Why the adaptations must not be applied here, or None."""
    version = importlib.metadata.version("speculators")
    if version != WRITTEN_FOR:
        return f"written for speculators {WRITTEN_FOR}, found {version}: check each adaptation against its source"
    if torch.accelerator.is_available():
        return "this machine has an accelerator: run `speculators train` unchanged"
    if "LOCAL_RANK" in os.environ:
        return "started by torchrun, whose processes need an accelerator each: start one process, without torchrun"
    return None


def adapt() -> None:
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
        print(f"aerie.training.cpu_launcher: {problem}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    adapt()
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    train(TrainConfig.resolve(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
