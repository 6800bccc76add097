"""Verification before training: every way in which a state file can be wrong is found, with the file named."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from speculators.data_generation.offline import find_corrupt_hidden_state_indices, get_existing_hidden_state_indices
from speculators.train.data import ArrowDataset

from aerie.artefacts.corpus import CORPUS_SCHEMA, CorpusWriter
from aerie.artefacts.files import atomic_folder
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.state_files import link_rows, state_name, state_path, write_states
from aerie.errors import Failed
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.verify import verify
from aerie.stages import Events

LAYERS = CapturedLayers(auxiliary=(2, 4, 5), decoder_layers=8, hidden_size=6, dtype="bfloat16")
ROWS = 12


def ids_of(row):
    return [row, row + 1, 7, 9][: 2 + row % 3]


@pytest.fixture
def files(tmp_path):
    """A corpus of twelve rows with its states, all of them right; one sample id is not a file name."""
    import pyarrow as pa

    files = EditionFiles(tmp_path, "main")
    names = [f"B1/{row}" for row in range(ROWS)]
    table = {
        "input_ids": [ids_of(row) for row in range(ROWS)],
        "loss_mask": [[0, *[1] * (len(ids_of(row)) - 1)] for row in range(ROWS)],
        "seq_len": [len(ids_of(row)) for row in range(ROWS)],
        "sample_id": names,
        **{c: ["x"] * ROWS for c in ("conversation_id", "dataset", "source_revision", "edition", "licence")},
        "split": ["train"] * ROWS,
    }
    with atomic_folder(files.corpus / "dataset") as folder:
        writer = CorpusWriter(folder)
        writer.write_shard(pa.table(table, schema=CORPUS_SCHEMA))
        writer.close(fingerprint="f" * 64)
    for row, name in enumerate(names):
        write(files, row, name=name)
    link_rows(files.hidden_states, files.states, [state_name(name) for name in names])
    return files


def verified(files, *, progress_seconds=60):
    return verify(files, LAYERS, Events(files.folder / "events.jsonl"), progress_seconds=progress_seconds)


def path_of(files, row, name=None):
    return state_path(files.states, state_name(name or f"B1/{row}"))


def write(files, row, *, ids=None, states=None, name=None):
    ids = ids_of(row) if ids is None else ids
    generator = torch.Generator().manual_seed(row)
    if states is None:
        states = torch.randn(len(ids), LAYERS.slots, LAYERS.hidden_size, generator=generator, dtype=torch.float32)
        states = states.bfloat16()
    write_states(path_of(files, row, name), token_ids=torch.tensor(ids), hidden_states=states)


def states(files, row):
    return torch.randn(len(ids_of(row)), LAYERS.slots, LAYERS.hidden_size).bfloat16()


def test_good_states_pass_and_are_what_speculators_reads(files):
    states = verified(files)
    assert (states.rows, states.tokens) == (ROWS, sum(len(ids_of(row)) for row in range(ROWS)))

    existing = get_existing_hidden_state_indices(files.hidden_states)
    assert existing == list(range(ROWS))
    assert find_corrupt_hidden_state_indices(files.hidden_states, existing) == {}
    (files.corpus / "dataset" / "hidden_states").symlink_to(files.hidden_states)
    data = ArrowDataset(max_len=64, datapath=str(files.corpus / "dataset"), on_missing="raise")
    item = data[3]
    assert item["input_ids"].tolist() == ids_of(3)
    assert item["hidden_states"].shape == (len(ids_of(3)), 3 * LAYERS.hidden_size)


def test_hours_of_reading_are_not_silent(files):
    verified(files, progress_seconds=0)
    told = [json.loads(line) for line in (files.folder / "events.jsonl").read_text().splitlines()]
    assert [(one["rows"], one["of_rows"]) for one in told] == [(row + 1, ROWS) for row in range(ROWS)]
    assert told[-1]["bytes"] == sum(path.stat().st_size for path in files.states.iterdir())


def remove(files):
    path_of(files, 4).unlink()


def truncate(files):
    path = path_of(files, 4)
    path.write_bytes(path.read_bytes()[:-8])


def overwrite_header(files):
    path = path_of(files, 4)
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def swap(files):
    ours, theirs = path_of(files, 4), path_of(files, 7)
    content = ours.read_bytes()
    shutil.copy(theirs, ours)
    theirs.write_bytes(content)


def change_token(files):
    write(files, 4, ids=[4, 6, 7])


def cut_rows(files):
    write(files, 4, states=states(files, 4)[:-1])


def drop_layer(files):
    write(files, 4, states=states(files, 4)[:, 1:])


def store_float32(files):
    write(files, 4, states=states(files, 4).float())


def put_nan(files):
    broken = states(files, 4)
    broken[1, 2, 3] = torch.nan
    write(files, 4, states=broken)


def zero_block(files):
    broken = states(files, 4)
    broken[-1] = 0
    write(files, 4, states=broken)


def scale(files):
    write(files, 4, states=states(files, 4) * 100)


def rename_tensor(files):
    save_file({"token_ids": torch.tensor(ids_of(4)), "states": states(files, 4)}, path_of(files, 4))


@pytest.mark.parametrize(
    ("sabotage", "problem"),
    [
        (remove, "missing"),
        (truncate, "cannot be read"),
        (overwrite_header, "cannot be read"),
        (swap, "belongs to other tokens: id 7 at position 0"),
        (change_token, "belongs to other tokens: id 6 at position 1"),
        (cut_rows, r"hidden states of shape \[2, 4, 6\]; expected \[3, 4, 6\]"),
        (drop_layer, r"hidden states of shape \[3, 3, 6\]; expected \[3, 4, 6\]"),
        (store_float32, "torch.float32; expected torch.bfloat16"),
        (put_nan, "not finite"),
        (zero_block, "all zero"),
        (scale, "far from the medians"),
        (rename_tensor, "expected token_ids and hidden_states"),
    ],
)
def test_a_file_that_would_spoil_training_is_named(files, sabotage, problem):
    sabotage(files)
    with pytest.raises(Failed, match=rf"hs_4\.safetensors: .*{problem}"):
        verified(files)
    assert not path_of(files, 4).exists()
    assert len(list(files.states.glob("*.safetensors"))) >= ROWS - 2


def test_links_of_an_earlier_shuffle_are_found(files):
    order = np.roll(np.arange(ROWS), 1)
    link_rows(files.hidden_states, files.states, [state_name(f"B1/{row}") for row in order])
    with pytest.raises(Failed, match=rf"{ROWS} state files are wrong.* none is removed"):
        verified(files)
    assert len(list(files.states.glob("*.safetensors"))) == ROWS


def test_some_links_of_an_earlier_shuffle_cost_no_file(files):
    order = [1, 0, *range(2, ROWS)]
    link_rows(files.hidden_states, files.states, [state_name(f"B1/{row}") for row in order])
    with pytest.raises(Failed, match=r"2 state files are wrong.* none is removed"):
        verified(files)
    assert len(list(files.states.glob("*.safetensors"))) == ROWS


def test_a_first_token_that_draws_attention_does_not_make_a_short_row_look_broken(files):
    sink = states(files, 4)
    sink[0] *= 1000
    write(files, 4, states=sink)
    assert verified(files).rows == ROWS


def test_a_link_beyond_the_corpus_is_found(files):
    link_rows(files.hidden_states, files.states, [state_name(f"B1/{row}") for row in (*range(ROWS), 0)])
    with pytest.raises(Failed, match=rf"hs_{ROWS}\.safetensors: belongs to no corpus row"):
        verified(files)
