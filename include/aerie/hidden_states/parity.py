"""Comparing captured states with a plain float32 forward pass of transformers.

Wrong layers, a layer off by one, or states after the norm raise no error anywhere but in the served benchmark, at about
1 % acceptance; this finds them before training. Not for checkpoints that transformers cannot hold in memory on the
CPU: set ``hidden_states.parity_rows`` to 0 for those.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.manifest import Manifest
from aerie.artefacts.state_files import read_states, state_name, state_path
from aerie.errors import Failed
from aerie.hidden_states.decoder import layers_of, load_decoder, streams_of
from aerie.hidden_states.layers import CapturedLayers
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events

STORAGE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
FP8_TOLERANCE = 8e-2
"""float8_e4m3fn keeps four significant bits, about 2.6 % of the norm; slots far smaller than the largest lose more."""
COMPUTE_TOLERANCE = {"float32": 0.0, "float16": 2e-2, "bfloat16": 5e-2}

SAME = 0.2
"""Below this relative difference states are named after what they are; neighbouring layers are further apart."""

REMEDY = (
    "mend what computes them, then capture with --force (in a new run, and without --rank), which discards these states"
)


@dataclass(frozen=True)
class Parity:
    """Largest differences over the rows compared; relative ones are norm of difference over norm of reference."""

    rows: int
    maximum_relative: float
    maximum_absolute: float
    tolerance: float


def parity_of_rows(
    rows: Iterable[CorpusRow], states: Path, layers: CapturedLayers, settings: PipelineSettings, events: Events
) -> Parity | None:
    """Compare the first of ``rows``, as many as the settings say, and tell of it; None, and said, where none are.

    Raises:
        Failed: as ``compare_with_transformers``.
    """
    wanted = settings.hidden_states.parity_rows
    if not wanted:
        events.progress("captured states are not compared with transformers: hidden_states.parity_rows is 0")
        return None
    parity = compare_with_transformers(list(islice(rows, wanted)), states, layers, settings)
    events.progress(
        f"captured states of {parity.rows} rows equal transformers to {parity.maximum_relative:.2g} of their norm "
        f"(allowed {parity.tolerance:g}), {parity.maximum_absolute:.2g} at most"
    )
    return parity


def is_compared(captured: Manifest, *, rows: int) -> bool:
    """Whether a capture was compared in ``rows`` of its rows, or in all where it has fewer."""
    parity: Mapping[str, int] | None = captured.counts["parity"]
    files: int = captured.counts["files"]
    compared = 0 if parity is None else parity["rows"]
    return compared >= min(rows, files)


def compare_with_transformers(
    rows: Sequence[CorpusRow], states: Path, layers: CapturedLayers, settings: PipelineSettings
) -> Parity:
    """Compare the state files of ``rows`` with transformers.

    Raises:
        Failed: a slot is nearer to another layer than to the one it is named after, or off by more than the tolerance
            (that of the stored type plus that of the server's compute type).
    """
    stored = STORAGE_TOLERANCE[layers.dtype] if layers.storage == "plain" else FP8_TOLERANCE
    tolerance = stored + COMPUTE_TOLERANCE[settings.verifier.dtype]
    reference = Reference(settings)
    relative, absolute = 0.0, 0.0
    for row in rows:
        captured = read_states(state_path(states, state_name(row.sample_id))).hidden_states.float()
        streams = reference.residual_streams(torch.from_numpy(row.input_ids.astype(np.int64)))
        _refuse_after_norm(row, captured[:, -1], streams[-1], reference.after_norm(streams[-1]))
        for slot, layer in enumerate((*layers.auxiliary, layers.decoder_layers)):
            differences = (streams - captured[:, slot]).norm(dim=(1, 2)) / streams.norm(dim=(1, 2))
            _require(row, slot, layer, differences, tolerance)
            relative = max(relative, float(differences[layer]))
            absolute = max(absolute, float((streams[layer] - captured[:, slot]).abs().max()))
    return Parity(rows=len(rows), maximum_relative=relative, maximum_absolute=absolute, tolerance=tolerance)


def _refuse_after_norm(row: CorpusRow, last: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    difference = float((after - last).norm() / after.norm())
    if difference < SAME and difference < float((before - last).norm() / before.norm()):
        raise Failed(
            f"sample {row.sample_id}, last slot: captured states are those after the final norm (relative difference "
            f"{difference:.2g}), not those before it; {REMEDY}"
        )


def _require(row: CorpusRow, slot: int, layer: int, differences: torch.Tensor, tolerance: float) -> None:
    nearest = int(differences.argmin())
    if nearest != layer and differences[nearest] < SAME:
        raise Failed(
            f"sample {row.sample_id}, slot {slot}: captured states are those entering layer {nearest} (relative "
            f"difference {float(differences[nearest]):.2g}), not layer {layer} ({float(differences[layer]):.2g}); "
            f"{REMEDY}"
        )
    if differences[layer] > tolerance:
        raise Failed(
            f"sample {row.sample_id}, slot {slot} (layer {layer}): captured states differ from transformers by "
            f"{float(differences[layer]):.2g} of their norm, more than {tolerance:g}: another model, or a server that "
            f"computes differently; {REMEDY}"
        )


class Reference:
    """The verifier in transformers, float32 on the CPU, one row at a time."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._decoder = load_decoder(settings, dtype=torch.float32, device="cpu")
        self._layers = range(len(layers_of(self._decoder)) + 1)

    def residual_streams(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Residual streams entering each layer, then the last layer's output before the norm: [layers + 1, S, H]."""
        with torch.inference_mode(), streams_of(self._decoder, self._layers) as streams:
            self._decoder(input_ids[None], use_cache=False)
            return torch.cat([streams[layer] for layer in self._layers])

    def after_norm(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm of ``states`` [..., H]."""
        with torch.inference_mode():
            normalised: torch.Tensor = self._decoder.norm(states)
        return normalised
