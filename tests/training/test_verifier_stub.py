import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.errors import BadInput
from aerie.training.verifier_stub import write_verifier_stub


def checkpoint(folder, configuration, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configuration))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_nested_quantised_kimi_becomes_what_the_trainer_loads(tmp_path):
    embedding, head, norm = torch.rand(8, 4), torch.rand(8, 4), torch.rand(4)
    kimi = checkpoint(
        tmp_path / "kimi",
        {
            "model_type": "kimi_k25",
            "auto_map": {"AutoConfig": "remote.Code"},
            "text_config": {
                "model_type": "kimi_k2",
                "auto_map": {"AutoConfig": "remote.Code"},
                "quantization_config": {"bits": 4},
                "vocab_size": 8,
                "hidden_size": 4,
            },
        },
        {
            "language_model.model.embed_tokens.weight": embedding,
            "language_model.lm_head.weight": head,
            "language_model.model.norm.weight": norm,
            "language_model.model.layers.0.input_layernorm.weight": torch.rand(4),
        },
    )
    stub = write_verifier_stub(kimi, tmp_path / "stub")
    configuration = json.loads((stub / "config.json").read_text())
    assert configuration["model_type"] == "deepseek_v3"
    assert not {"auto_map", "quantization_config"} & configuration.keys()
    tensors = load_file(stub / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], embedding)
    assert torch.equal(tensors["lm_head.weight"], head)
    assert torch.equal(tensors["model.norm.weight"], norm)
    assert len(tensors) == 3


def test_a_checkpoint_whose_tensors_are_not_what_it_says_is_refused(tmp_path):
    names = {"model.embed_tokens.weight": torch.rand(8, 4), "model.norm.weight": torch.rand(4)}
    base = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4}
    headless = checkpoint(tmp_path / "headless", base, names)
    with pytest.raises(BadInput, match=r"no tensor lm_head\.weight"):
        write_verifier_stub(headless, tmp_path / "stub")
    tied = checkpoint(tmp_path / "tied", {**base, "tie_word_embeddings": True}, names)
    stub = load_file(write_verifier_stub(tied, tmp_path / "stub") / "model.safetensors")
    assert torch.equal(stub["lm_head.weight"], names["model.embed_tokens.weight"])
    packed = checkpoint(tmp_path / "packed", base, {**names, "lm_head.weight": torch.zeros(8, 4, dtype=torch.int32)})
    with pytest.raises(BadInput, match=r"lm_head\.weight is torch\.int32"):
        write_verifier_stub(packed, tmp_path / "other")
    assert not (tmp_path / "other").exists()
