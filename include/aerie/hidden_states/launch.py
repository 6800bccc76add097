"""How a capturing server must be launched; needs none of the model environment's packages."""

from collections.abc import Mapping, Sequence
from typing import Any

from aerie.artefacts.manifest import read_manifest
from aerie.hidden_states.layers import planned_layers
from aerie.hidden_states.protocol import forward_hooks
from aerie.stages import StageRequest


def capture_hooks(request: StageRequest) -> list[Mapping[str, Any]]:
    """Value of SGLang's ``--forward-hooks`` (as JSON) for the edition's capture, for the layers of its forecast.

    Raises:
        BadInput: the edition has no forecast yet.
    """
    return _hooks(request, layers=read_manifest(request.files.manifest("forecast")).counts["layers"])


def generation_hooks(request: StageRequest) -> list[Mapping[str, Any]]:
    """The same for the edition's generation: none, unless ``hidden_states.capture`` is ``generate``.

    Its layers are those of the settings: there is no forecast of a corpus before the corpus.

    Raises:
        BadInput: the settings name layers that cannot be captured.
    """
    settings = request.settings
    generated = settings.hidden_states.generated_bytes
    if generated is None:
        return []
    return _hooks(request, layers=planned_layers(settings).auxiliary, generated_bytes=generated)


def _hooks(
    request: StageRequest, *, layers: Sequence[int], generated_bytes: int | None = None
) -> list[Mapping[str, Any]]:
    settings = request.settings
    return forward_hooks(
        states=request.files.states.resolve(),  # the server runs in another folder
        module_prefix=settings.verifier.load_profile().module_prefix,
        layers=layers,
        dtype=settings.hidden_states.dtype,
        generated_bytes=generated_bytes,
    )
