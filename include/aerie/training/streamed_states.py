"""The trainer's side of streamed states: a back end of ``hs_connectors`` that waits for a row, takes it and removes it.

Importing this registers it. Where no more states will come, a row is a fatal ``SampleUnavailable``: speculators' own
mark for a batch that must not be trained on, which it carries from any data loader worker to the trainer.
``save_where_states_end`` makes the trainer save its state there, between two batches, as it does on a signal.
"""

import argparse
import os
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from speculators.train.recovery import RECOVERY_METADATA_KEY, SampleUnavailable

from aerie.artefacts.state_stream import Stream, read_stream, take, why_ended
from aerie.errors import Failed

BACKEND = "aerie_streamed"
POLL_SECONDS = 0.02
LOOK_FOR_END_SECONDS = 1.0
STATES_ENDED = b"\nAerie: no more hidden states, interrupting training to save checkpoint before this batch: "


class StreamedStates(HiddenStatesTransfer):  # type: ignore[misc]
    """States of the rows that are captured into ``folder`` as they are trained on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _stream(self) -> Stream:
        return read_stream(self._folder)

    @cached_property
    def _parent(self) -> int:
        """Whoever started this process: the stage, or the trainer for a data loader worker."""
        return os.getppid()

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | SampleUnavailable:
        """States of corpus row ``file_idx``, waited for.

        Raises:
            Failed: they did not come in time, or cannot be read.
        """
        stream, parent, began = self._stream, self._parent, time.monotonic()
        look_at = began
        while True:
            if os.getppid() != parent:  # a worker of a trainer that was killed must not take what is for the next one
                return _ended(f"process {parent}, which started this one, is gone")
            state = take(self._folder, file_idx)
            if state is not None:
                return {"token_ids": state.token_ids, "hidden_states": state.hidden_states}
            now = time.monotonic()
            if now >= look_at:
                look_at = now + LOOK_FOR_END_SECONDS
                reason = why_ended(self._folder, stream)
                if reason is not None:
                    return _ended(reason)
            if now - began > stream.wait_seconds:
                raise Failed(
                    f"{self._folder}: the states of corpus row {file_idx} were not captured within "
                    f"{stream.wait_seconds:.0f} s, and whoever captures them has not failed: rows are asked for in "
                    "another order than they are captured in; check training.extra_arguments"
                )
            time.sleep(POLL_SECONDS)

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Nothing is generated on demand: every row is captured in its turn."""
        raise NotImplementedError(f"streamed states are never asked for by parameters: {hs_transfer_params}")


def _ended(reason: str) -> SampleUnavailable:
    return SampleUnavailable(reason=reason, counts_as_failure=True, consecutive_failures=1, fatal=True)


@HiddenStatesBackend.register(BACKEND)
class StreamedBackend(HiddenStatesBackend):  # type: ignore[misc]
    """``StreamedStates`` for ``--hidden-states-backend``."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """The folder, by the flag that the file back end has."""
        parser.add_argument("--hidden-states-path", type=str, default=None)

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: vLLM is not launched for it."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StreamedStates:  # noqa: ARG004
        """The states of the folder that the trainer's configuration names."""
        return StreamedStates(Path(args.hidden_states_path))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """None: vLLM is not launched for it."""
        raise NotImplementedError(f"{BACKEND}: states come from Aerie's capture, not from vLLM ({args})")


def save_where_states_end() -> None:
    """Let the trainer save its state and end before a batch whose states will not come."""
    from speculators.train import graceful_shutdown, trainer

    class Batches(trainer.BatchRecoveryCoordinator):  # type: ignore[misc]
        def consume(self, batch: dict[str, Any], *, synchronize: bool = False) -> None:
            recovery = batch.get(RECOVERY_METADATA_KEY)
            if recovery is not None and recovery.fatal:
                os.write(sys.stderr.fileno(), STATES_ENDED + recovery.error.encode() + b"\n")
                raise graceful_shutdown.TrainingInterruptedError(recovery.error)
            super().consume(batch, synchronize=synchronize)

    trainer.BatchRecoveryCoordinator = Batches
