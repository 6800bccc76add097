"""Which layers are captured, and what their states weigh."""

import warnings
from dataclasses import dataclass

from speculators.models.utils import get_verifier_config, resolve_target_layer_ids

from aerie.errors import BadInput
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import checkpoint_code_allowed

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class CapturedLayers:
    """Auxiliary layers, each the residual stream entering that layer, and the last layer's output before the norm."""

    auxiliary: tuple[int, ...]
    decoder_layers: int
    hidden_size: int
    dtype: str

    @property
    def slots(self) -> int:
        """Hidden states stored for each token."""
        return len(self.auxiliary) + 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of hidden states for each token."""
        return self.slots * self.hidden_size * DTYPE_BYTES[self.dtype]


def resolve_layers(settings: PipelineSettings) -> CapturedLayers:
    """Layers to capture: the settings', else the profile's, else speculators' default for the verifier's depth.

    Raises:
        BadInput: the verifier's configuration cannot be read, or a layer cannot be captured.
    """
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
    depth = config.num_hidden_layers
    outside = [layer for layer in layers if not 1 <= layer < depth]
    if outside:
        raise BadInput(
            f"hidden_states.layers {list(layers)}: {outside} cannot be captured, expected ids from 1 to {depth - 1} "
            "(layer 0 receives the embedding; the last layer's output is always stored)"
        )
    return CapturedLayers(
        auxiliary=tuple(layers),
        decoder_layers=depth,
        hidden_size=config.hidden_size,
        dtype=settings.hidden_states.dtype,
    )
