"""How a capturing server must be launched; needs none of the model environment's packages."""

from collections.abc import Mapping
from typing import Any

from aerie.artefacts.manifest import read_manifest
from aerie.hidden_states.protocol import forward_hooks
from aerie.stages import StageRequest


def capture_hooks(request: StageRequest) -> list[Mapping[str, Any]]:
    """Value of SGLang's ``--forward-hooks`` (as JSON) for the edition's capture, for the layers of its forecast.

    Raises:
        BadInput: the edition has no forecast yet.
    """
    settings = request.settings
    return forward_hooks(
        states=request.files.states.resolve(),  # the server runs in another folder
        module_prefix=settings.verifier.load_profile().module_prefix,
        layers=read_manifest(request.files.manifest("forecast")).counts["layers"],
        dtype=settings.hidden_states.dtype,
    )
