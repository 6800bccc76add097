"""What the trainer prints about its steps, as figures.

speculators logs each step on the console as ``train/loss=1.234, ..., epoch=0, lr=1.00e-03, global_step=12`` and each
validation as ``val/loss_epoch=..., epoch=0`` (its ``FormatDictFilter``); to a file it logs only through TensorBoard.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_FIGURE = re.compile(r"([\w/.]+)=(-?(?:\d[\d.]*(?:e[+-]?\d+)?|nan|inf))(?=[,\s]|$)")
_STEP_MARK = "global_step="
_VALIDATION_MARK = "val/loss_epoch="
_SIGNAL_MARK = "interrupting training to save checkpoint"


@dataclass(frozen=True)
class Step:
    """One optimizer step. ``accuracies`` are of the draft positions, given that all before were right."""

    global_step: int
    epoch: int
    loss: float
    error_records: float
    learning_rate: float | None
    tokens_per_second: float | None
    accuracies: tuple[float, ...]

    @property
    def fault(self) -> str | None:
        """Why training must not go on, or None.

        speculators itself goes on: a batch whose hidden states do not belong to its tokens is replaced by an empty one,
        with loss 0 and the rows counted in ``error_records``.
        """
        where = f"step {self.global_step} of epoch {self.epoch}"
        if self.error_records > 0:
            return (
                f"{where}: {self.error_records:g} rows of the batch had hidden states that do not belong to their "
                "tokens (error_records); run capture again"
            )
        if not math.isfinite(self.loss):
            return f"{where}: the loss is {self.loss}; lower training.learning_rate, and check the hidden states"
        if self.loss == 0.0:
            return (
                f"{where}: the loss is exactly 0: the batch held nothing to learn from; check masks and hidden states"
            )
        return None


def parse_figures(line: str) -> dict[str, float]:
    """All ``name=number`` pairs of a line."""
    return {name: float(value) for name, value in _FIGURE.findall(line)}


def parse_step(line: str) -> Step | None:
    """The step that the line reports, or None."""
    if _STEP_MARK not in line or "train/loss=" not in line:
        return None
    figures = parse_figures(line)
    return Step(
        global_step=int(figures["global_step"]),
        epoch=int(figures["epoch"]),
        loss=figures["train/loss"],
        error_records=figures["train/error_records"],
        learning_rate=figures.get("lr", figures.get("lr/AdamW")),
        tokens_per_second=figures.get("profile/tokens_per_s"),
        accuracies=_accuracies(figures, "train/cond_acc_{}"),
    )


def parse_validation(line: str) -> dict[str, float] | None:
    """The validation metrics that the line reports, under their own names, or None."""
    if _VALIDATION_MARK not in line:
        return None
    figures = parse_figures(line)
    return {name.removeprefix("val/"): value for name, value in figures.items() if name.startswith("val/")}


def validated_epochs(lines: Iterable[str]) -> set[int]:
    """Epochs whose validation the lines of a log report."""
    return {int(parse_figures(line)["epoch"]) for line in lines if _VALIDATION_MARK in line}


def says_interrupted(line: str) -> bool:
    """Whether the line says that the trainer got a signal and is saving its state."""
    return _SIGNAL_MARK in line


def _accuracies(figures: Mapping[str, float], pattern: str) -> tuple[float, ...]:
    positions: list[float] = []
    while (name := pattern.format(len(positions))) in figures:
        positions.append(figures[name])
    return tuple(positions)
