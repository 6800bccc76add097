"""How much disk and time the hidden states will take, and where, against how much disk there is."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from aerie.errors import Failed
from aerie.hidden_states.layers import CapturedLayers

SECONDS_PER_HOUR = 3600
EXPECTED = "expected_rates.capture_tokens_per_second"


@dataclass(frozen=True)
class CaptureRate:
    """Tokens that a capture takes a second, and how that is known."""

    tokens_per_second: float
    source: str


@dataclass(frozen=True)
class Forecast:
    """Bytes that a capture needs and has, for a corpus of ``tokens`` tokens, prompts included.

    ``present_bytes`` are what the states that are there take in the storage that they will have.
    ``discarded_bytes`` are those of states that a forced capture removes first.
    ``window_bytes`` is what the states may take at once when they are streamed, None when they are kept; they are
    captured in each of ``epochs`` then. ``rate`` None: not known, and not guessed.
    """

    tokens: int
    bytes_per_token: int
    present_bytes: int
    free_bytes: int
    spared_bytes: int
    folder: Path
    discarded_bytes: int = 0
    window_bytes: int | None = None
    epochs: int = 1
    rate: CaptureRate | None = None

    @property
    def missing_tokens(self) -> int:
        """Tokens that are still to be captured."""
        if self.window_bytes is not None:
            return self.captured_tokens
        return min(self.tokens, -(-self.missing_bytes // self.bytes_per_token))

    @property
    def hours(self) -> float | None:
        """How long they take."""
        return None if self.rate is None else self.missing_tokens / self.rate.tokens_per_second / SECONDS_PER_HOUR

    @property
    def captured_tokens(self) -> int:
        """Tokens to be sent through the verifier for the whole training."""
        return self.tokens if self.window_bytes is None else self.tokens * self.epochs

    @property
    def total_bytes(self) -> int:
        """Bytes of all states."""
        return self.tokens * self.bytes_per_token

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be written."""
        wanted = self.total_bytes if self.window_bytes is None else self.window_bytes
        return max(0, wanted - self.present_bytes)

    @property
    def fits(self) -> bool:
        """Whether the missing bytes fit beside what must stay free."""
        return self.missing_bytes <= self.free_bytes + self.discarded_bytes - self.spared_bytes

    @property
    def sum(self) -> str:
        """The arithmetic, as a sentence."""
        return (
            f"{self.tokens:,} tokens x {self.bytes_per_token:,} bytes = {_gigabytes(self.total_bytes)}, of which "
            f"{_gigabytes(self.present_bytes)} are there{self._discarding}; {self.folder} has "
            f"{_gigabytes(self.free_bytes)} free, {_gigabytes(self.spared_bytes)} of them to be spared"
            f"{self._streaming}; {self._time}"
        )

    @property
    def _time(self) -> str:
        if self.rate is None:
            return f"time not known: no capture of this edition was measured, and {EXPECTED} is not set"
        return (
            f"{self.missing_tokens:,} tokens / {self.rate.tokens_per_second:,.0f} tokens/s = {self.hours:,.1f} h "
            f"({self.rate.source})"
        )

    @property
    def _discarding(self) -> str:
        return f" once --force has discarded {_gigabytes(self.discarded_bytes)}" if self.discarded_bytes else ""

    @property
    def _streaming(self) -> str:
        if self.window_bytes is None:
            return ""
        return (
            f"; more than hidden_states.disk_limit_gib allows: streamed while training, "
            f"{_gigabytes(self.window_bytes)} at once, captured in each of {self.epochs} epochs = "
            f"{self.captured_tokens:,} tokens"
        )


def forecast_disk(
    *,
    tokens: int,
    layers: CapturedLayers,
    folder: Path,
    present_bytes: int,
    free_share: float,
    discarded_bytes: int = 0,
    window_bytes: int | None = None,
    epochs: int = 1,
    rate: CaptureRate | None = None,
) -> Forecast:
    """Forecast a capture into ``folder``, which need not exist; ``free_share`` of its disk must stay free.

    ``discarded_bytes``, ``window_bytes``, ``epochs`` and ``rate`` are those of ``Forecast``.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    disk = shutil.disk_usage(existing)
    return Forecast(
        tokens=tokens,
        bytes_per_token=layers.bytes_per_token,
        present_bytes=present_bytes,
        free_bytes=disk.free,
        spared_bytes=int(disk.total * free_share),
        folder=folder,
        discarded_bytes=discarded_bytes,
        window_bytes=window_bytes,
        epochs=epochs,
        rate=rate,
    )


def require_fit(forecast: Forecast) -> None:
    """Refuse a capture that the disk cannot hold.

    Raises:
        Failed: with the sum.
    """
    if not forecast.fits:
        raise Failed(
            f"hidden states do not fit: {forecast.sum}; free disk, lower budgets, corpus.maximum_length or "
            "hidden_states.free_share, or capture elsewhere (AERIE_DATA_ROOT)"
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
