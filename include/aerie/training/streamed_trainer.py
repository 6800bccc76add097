"""``speculators train`` under torchrun with streamed states: ``-m aerie.training.streamed_trainer --config run.yaml``.

A single process is started through ``aerie.training.launcher``, which has the same.
"""

import sys

from aerie.training.streamed_states import save_where_states_end


def main(arguments: list[str]) -> None:
    """Run ``speculators train`` with these arguments, as one of torchrun's processes."""
    save_where_states_end()
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    train(TrainConfig.resolve(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
