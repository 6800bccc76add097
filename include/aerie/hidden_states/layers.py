"""Which layers are captured, and what their states weigh.

Both sides import this: speculators, which only the model environment has, is imported where it is called.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

from aerie.errors import BadInput
from aerie.serving.model_config import read_model_config
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import checkpoint_code_allowed

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
FP8_BYTES, FP8_SCALE_BYTES = 1, 4
"""Of each value, and of the one scale that a token has."""


@dataclass(frozen=True)
class CapturedLayers:
    """Auxiliary layers, each the residual stream entering that layer, and the last layer's output before the norm."""

    auxiliary: tuple[int, ...]
    decoder_layers: int
    hidden_size: int
    dtype: str
    storage: Literal["plain", "fp8"] = "plain"

    @property
    def slots(self) -> int:
        """Hidden states stored for each token."""
        return len(self.auxiliary) + 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of hidden states for each token."""
        if self.storage == "fp8":
            return self.slots * self.hidden_size * FP8_BYTES + FP8_SCALE_BYTES
        return self.slots * self.hidden_size * DTYPE_BYTES[self.dtype]


def resolve_layers(settings: PipelineSettings) -> CapturedLayers:
    """Layers to capture: the settings', else the profile's, else speculators' default for the verifier's depth.

    Raises:
        BadInput: the verifier's configuration cannot be read, or a layer cannot be captured.
    """
    from speculators.models.utils import get_verifier_config, resolve_target_layer_ids

    verifier, profile = settings.verifier, settings.verifier.load_profile()
    asked = settings.hidden_states.layers or profile.capture_layers
    path = str(verifier.path)
    trust = checkpoint_code_allowed(profile, allowed=verifier.trust_remote_code, revision=verifier.revision)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the default is chosen on purpose
            layers = resolve_target_layer_ids(list(asked) if asked else None, path, trust_remote_code=trust)
        config = get_verifier_config(path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise BadInput(f"verifier {path}: cannot tell which layers to capture: {error}") from error
    return _captured(tuple(layers), config.num_hidden_layers, config.hidden_size, settings)


def planned_layers(settings: PipelineSettings) -> CapturedLayers:
    """The layers of ``resolve_layers``, read from ``config.json`` by ourselves, where speculators is not installed.

    Raises:
        BadInput: the verifier's configuration cannot be read, or a layer cannot be captured.
    """
    config = read_model_config(settings.verifier.path)
    depth = config.count("num_hidden_layers")
    asked = settings.hidden_states.layers or settings.verifier.load_profile().capture_layers
    return _captured(asked or default_layers(depth), depth, config.count("hidden_size"), settings)


def default_layers(depth: int) -> tuple[int, int, int]:
    """Layers that speculators takes of a verifier with so many, where it is not told any."""
    return 2, depth // 2, depth - 3


def _captured(layers: tuple[int, ...], depth: int, hidden_size: int, settings: PipelineSettings) -> CapturedLayers:
    if len(set(layers)) != len(layers):
        raise BadInput(
            f"hidden_states.layers {list(layers)} of a verifier with {depth} layers: expected distinct ids; name them"
        )
    outside = [layer for layer in layers if not 1 <= layer < depth]
    if outside:
        raise BadInput(
            f"hidden_states.layers {list(layers)}: {outside} cannot be captured, expected ids from 1 to {depth - 1} "
            "(layer 0 receives the embedding; the last layer's output is always stored)"
        )
    return CapturedLayers(
        auxiliary=layers,
        decoder_layers=depth,
        hidden_size=hidden_size,
        dtype=settings.hidden_states.dtype,
        storage=settings.hidden_states.storage,
    )
