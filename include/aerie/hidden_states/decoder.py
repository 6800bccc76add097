"""The verifier in transformers, and the residual streams of its decoder, whatever its architecture."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from aerie.errors import BadInput
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import checkpoint_code_allowed


def load_decoder(settings: PipelineSettings, *, dtype: torch.dtype, device: str) -> Any:
    """The decoder of the verifier: embeddings, layers and final norm, without the head.

    Raises:
        BadInput: transformers cannot load the checkpoint.
    """
    verifier = settings.verifier
    trusted = checkpoint_code_allowed(
        verifier.load_profile(), allowed=verifier.trust_remote_code, revision=verifier.revision
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=dtype, trust_remote_code=trusted)
    except (OSError, ValueError, ImportError) as error:
        raise BadInput(f"verifier {verifier.path}: transformers cannot load it: {error}") from error
    return model.eval().to(device).get_decoder()


def layers_of(decoder: Any) -> Sequence[Any]:
    """The decoder's layers in order.

    Raises:
        BadInput: the decoder does not hold its layers as one list, so that none can be told.
    """
    depth = decoder.config.num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList) and len(child) == depth]
    if len(lists) != 1:
        raise BadInput(
            f"{type(decoder).__name__}: found {len(lists)} lists of {depth} layers in it, expected one: its hidden "
            "states cannot be captured with transformers"
        )
    found: Sequence[Any] = lists[0]
    return found


@contextmanager
def streams_of(decoder: Any, wanted: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """While inside, each forward pass leaves the residual streams [B, S, H] that enter the ``wanted`` layers.

    Layer id ``n``, the number of layers, stands for the last layer's output, before the final norm: transformers adds
    within a layer, so that what a layer returns is the residual stream.
    """
    layers = layers_of(decoder)
    streams: dict[int, torch.Tensor] = {}

    def take_input(layer: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            streams[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def take_output(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
        streams[len(layers)] = output[0] if isinstance(output, tuple) else output

    handles = [
        layers[layer].register_forward_pre_hook(take_input(layer), with_kwargs=True)
        for layer in wanted
        if layer < len(layers)
    ]
    if len(layers) in wanted:
        handles.append(layers[-1].register_forward_hook(take_output))
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()
