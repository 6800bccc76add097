"""Parity with transformers: the mistakes that raise no error anywhere but in the served benchmark."""

import numpy as np
import pytest
import torch

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.state_files import state_path, write_states
from aerie.errors import Failed
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.parity import Reference, compare_with_transformers

IDS = [5, 9, 9, 30, 2, 77, 100]
ROW = CorpusRow(
    row=0,
    sample_id="s",
    dataset="B1",
    split="train",
    input_ids=np.array(IDS, np.int32),
    loss_mask=np.ones(len(IDS), np.int8),
)


@pytest.fixture
def compare(edition, tmp_path):
    settings = edition.request(hidden_states={"dtype": "bfloat16"}).settings

    def run(change):
        reference = Reference(settings)
        streams = reference.residual_streams(torch.tensor(IDS))
        states = change(streams, reference._decoder.norm)
        write_states(state_path(tmp_path, "s"), token_ids=torch.tensor(IDS), hidden_states=states.bfloat16())
        return compare_with_transformers([ROW], tmp_path, resolve_layers(settings), settings)

    return run


def slots(streams, *layers):
    return torch.stack([streams[layer] for layer in layers], dim=1)


def test_bfloat16_rounding_of_the_right_layers_is_within_the_tolerance(compare):
    parity = compare(lambda streams, _: slots(streams, 2, 4, 5, 8))
    assert parity.rows == 1
    assert 1e-4 < parity.maximum_relative < parity.tolerance == 5e-3


def test_the_reference_equals_what_transformers_calls_hidden_states(edition):
    reference = Reference(edition.request().settings)
    streams = reference.residual_streams(torch.tensor(IDS))
    with torch.inference_mode():
        theirs = reference._decoder(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(streams[:-1], torch.cat(theirs[:-1]))
    torch.testing.assert_close(reference._decoder.norm(streams[-1]), theirs[-1][0])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s, _: slots(s, 3, 5, 6, 8), "slot 0: captured states are those entering layer 3 .* not layer 2"),
        (lambda s, _: slots(s, 4, 2, 5, 8), "entering layer 4 .* not layer 2"),
        (lambda s, norm: torch.cat([slots(s, 2, 4, 5), norm(s[8])[:, None]], dim=1), "after the final norm"),
        (lambda s, _: slots(s, 2, 4, 5, 8).flip(2), "slot 0 .*differ from transformers by .*another model"),
        (lambda s, _: slots(s, 2, 4, 5, 8) * 1.02, "differ from transformers by 0.02"),
    ],
    ids=["off by one", "swapped slots", "after the norm", "another model", "other values"],
)
def test_wrong_states_fail(compare, change, problem):
    with pytest.raises(Failed, match=f"{problem}.*; mend what computes them, then capture with --force"):
        compare(lambda streams, norm: change(streams, norm).detach())
