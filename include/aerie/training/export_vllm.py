"""speculators' own layout, which vLLM serves as it is: the checkpoint without what only training needs."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from speculators import SpeculatorModelConfig
from speculators.model import SpeculatorModel

from aerie.artefacts.files import atomic_folder
from aerie.errors import BadInput, Failed
from aerie.training.export import compare, read_configuration, read_tensors

VLLM_LAYERS = 3
"""vLLM gives an EAGLE-3 drafter the states of exactly so many layers."""


def export_for_vllm(checkpoint: Path, folder: Path, *, verifier: Path, stub: Path) -> None:
    """Write the drafter in ``checkpoint`` to ``folder`` in speculators' layout, atomically.

    ``vllm serve FOLDER`` then loads the verifier that the configuration names, with this drafter.

    Args:
        checkpoint: a checkpoint folder of speculators' trainer; its configuration names the stub that it trained with.
        folder: the new folder: ``config.json`` and ``model.safetensors``.
        verifier: the verifier's checkpoint, to be served.
        stub: the trainer's stub of the verifier, for reading back without the whole of it.

    Raises:
        BadInput: the checkpoint cannot be read.
        Failed: vLLM could not serve it, or speculators reads other tensors back.
    """
    configuration = read_configuration(checkpoint)
    layers = configuration["eagle_aux_hidden_state_layer_ids"]
    if len(layers) != VLLM_LAYERS:
        raise Failed(f"{checkpoint}: layers {layers}: vLLM serves drafters of exactly {VLLM_LAYERS} layers")
    tensors = read_tensors(checkpoint)
    with atomic_folder(folder) as temporary:
        shutil.copyfile(checkpoint / "model.safetensors", temporary / "model.safetensors")
        text = json.dumps(with_verifier(configuration, verifier), indent=2)
        (temporary / "config.json").write_text(text + "\n", encoding="utf-8")
        compare(tensors, read_back(temporary, stub), folder)


def with_verifier(configuration: dict[str, Any], verifier: Path) -> dict[str, Any]:
    """The configuration with the verifier that is served, and without the code that a checkpoint points to."""
    kept = {name: value for name, value in configuration.items() if name != "auto_map"}
    speculators = kept["speculators_config"]
    named = {**speculators["verifier"], "name_or_path": str(verifier.resolve())}
    return {**kept, "speculators_config": {**speculators, "verifier": named}}


def read_back(folder: Path, stub: Path) -> dict[str, torch.Tensor]:
    """The drafter's own tensors as speculators loads them; the verifier's, which it adds, are left out.

    Raises:
        BadInput: speculators cannot load the folder.
    """
    try:
        configuration = SpeculatorModelConfig.from_pretrained(folder)
        configuration.speculators_config.verifier.name_or_path = str(stub)
        drafter = SpeculatorModel.from_pretrained(folder, config=configuration)
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"{folder}: speculators cannot load what was written: {error}") from error
    return {
        name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items() if not name.startswith("verifier_")
    }
