"""Seconds that verifying hidden states before training takes for 10,000 files, and how many bytes a second that reads.

    PYTHONPATH=include python benchmarks/verify_states.py [--files 10000] [--tokens 100] [--hidden-size 128] [--fp8]

Every file is read whole, held against its corpus row, and its magnitudes against its data set's. Files are read from
the page cache where memory holds them: at the size of a real corpus the disk decides, so give its speed beside this
figure. Prints one JSON line.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from safetensors.torch import save_file

from aerie.artefacts.corpus import CORPUS_SCHEMA, DATASET_FOLDER, CorpusWriter
from aerie.artefacts.files import atomic_folder
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.state_files import link_rows, state_name, state_path
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.verify import verify
from aerie.stages import Events

AUXILIARY, DEPTH = (2, 30, 58), 61


def build(files: EditionFiles, layers: CapturedLayers, rows: int, tokens: int) -> None:
    """A corpus of random rows, and states that fit it; written without syncing, which is not what is measured."""
    ids = np.random.default_rng(0).integers(2, 100_000, (rows, tokens), dtype=np.int32)
    names = [f"B1/{row}" for row in range(rows)]
    table = {
        "input_ids": list(ids),
        "loss_mask": [np.ones(tokens, np.int8)] * rows,
        "seq_len": [tokens] * rows,
        "sample_id": names,
        **{name: ["x"] * rows for name in ("conversation_id", "dataset", "source_revision", "edition", "licence")},
        "split": ["train"] * rows,
    }
    with atomic_folder(files.corpus / DATASET_FOLDER) as folder:
        writer = CorpusWriter(folder)
        writer.write_shard(pa.table(table, schema=CORPUS_SCHEMA))
        writer.close(fingerprint="f" * 64)
    files.states.mkdir(parents=True)
    states = torch.randn(tokens, layers.slots, layers.hidden_size).bfloat16()
    tensors = {"hidden_states": states}
    if layers.storage == "fp8":
        compressed, scales = quantize_tensor_to_fp8(states)
        tensors = {"hidden_states": compressed, SCALES_KEY: scales}
    for name, row in zip(names, ids, strict=True):
        save_file({"token_ids": torch.from_numpy(row).long(), **tensors}, state_path(files.states, state_name(name)))
    link_rows(files.hidden_states, files.states, [state_name(name) for name in names])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--fp8", action="store_true")
    asked = parser.parse_args()
    layers = CapturedLayers(
        auxiliary=AUXILIARY,
        decoder_layers=DEPTH,
        hidden_size=asked.hidden_size,
        dtype="bfloat16",
        storage="fp8" if asked.fp8 else "plain",
    )
    with tempfile.TemporaryDirectory() as folder:
        files = EditionFiles(Path(folder), "main")
        build(files, layers, asked.files, asked.tokens)
        started, used = time.perf_counter(), time.process_time()
        verified = verify(files, layers, Events(Path(folder) / "events.jsonl"), progress_seconds=60)
        seconds, used = time.perf_counter() - started, time.process_time() - used
    print(
        json.dumps(
            {
                "files": verified.rows,
                "tokens_a_file": asked.tokens,
                "bytes": verified.bytes,
                "storage": layers.storage,
                "seconds": round(seconds, 2),
                "seconds_per_10000_files": round(seconds / verified.rows * 10_000, 2),
                "cpu_seconds_per_10000_files": round(used / verified.rows * 10_000, 2),
                "gigabytes_per_second": round(verified.bytes / seconds / 1e9, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
