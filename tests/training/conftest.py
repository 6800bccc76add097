import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from aerie.artefacts.corpus import CORPUS_SCHEMA, DATASET_FOLDER, CorpusWriter, write_token_frequencies
from aerie.artefacts.draft_vocabulary import write_draft_vocabulary
from aerie.artefacts.files import atomic_folder, fingerprint_of, write_json
from aerie.artefacts.manifest import describe_output, write_manifest
from aerie.artefacts.state_files import (
    link_rows,
    state_name,
    state_path,
    token_ids_sha256,
    write_states,
)
from aerie.artefacts.state_index import INDEX_FILE, IndexedState, write_index
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.corpus.vocabulary import choose
from aerie.hidden_states.checkpoint import checkpoint_fingerprint
from aerie.hidden_states.identity import IDENTITY_FILE
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import load_profile
from aerie.stages import Events, StageRequest

VOCABULARY_SIZE = 64
HIDDEN = 32
LAYERS = (2, 4, 5)
PROMPT_TOKENS = 4
SPECIAL = {token: 50 + n for n, token in enumerate(("<|im_middle|>", *load_profile("demo").forced_vocabulary))}


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of eight layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("verifier")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Edition:
    """An edition on disk, as ``capture`` leaves it.

    Auxiliary states are random but tied to their rows; the last slot's are those of a verifier that says every row.
    """

    def __init__(self, root: Path, verifier: Path) -> None:
        self.root = root
        self.verifier = verifier
        self.events_path = root / "events.jsonl"
        self.events = Events(self.events_path)

    def request(self, *, force: bool = False, training: dict[str, Any] | None = None) -> StageRequest:
        document = {
            "name": "test",
            "verifier": {"path": self.verifier, "profile": "demo", "dtype": "float32"},
            "serving": {"device": "cpu", "context_length": 256},
            "datasets": {"B1_glaive": {"source": {"reader": "glaive", "path": "x", "licence": "mit"}}},
            "generation": {"progress_seconds": 0.1},
            "corpus": {"maximum_length": 64},
            "vocabulary": {"size": 32},
            "training": {"epochs": 2, "sequence_length": 64, "learning_rate": 1e-3, "seed": 3, **(training or {})},
            "publish": {"folder": self.root / "published"},
        }
        return StageRequest(
            settings=PipelineSettings.model_validate(document),
            data_root=self.root / "data",
            server_folder=self.root / "server",
            edition="main",
            run_id="r",
            force=force,
        )

    @property
    def files(self) -> Any:
        return self.request().files

    def build(self, rows: int = 24, validation_rows: int = 4, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        ids = [response(generator.integers(2, 40, int(generator.integers(12, 30))).tolist()) for _ in range(rows)]
        self.merge(ids, rows - validation_rows)
        self.vocabulary(ids)
        self.capture(ids, seed)

    def merge(self, ids: list[list[int]], train_rows: int) -> None:
        names = [f"B1/{row}" for row in range(len(ids))]
        table = {
            "input_ids": ids,
            "loss_mask": [[0] * PROMPT_TOKENS + [1] * (len(row) - PROMPT_TOKENS) for row in ids],
            "seq_len": [len(row) for row in ids],
            "sample_id": names,
            "conversation_id": names,
            "dataset": ["B1_glaive"] * len(ids),
            **{name: ["x"] * len(ids) for name in ("source_revision", "edition", "licence")},
            "split": ["train"] * train_rows + ["validation"] * (len(ids) - train_rows),
        }
        dataset = self.files.corpus / DATASET_FOLDER
        with atomic_folder(dataset) as folder:
            writer = CorpusWriter(folder)
            writer.write_shard(pa.table(table, schema=CORPUS_SCHEMA))
            writer.close(fingerprint=fingerprint_of(ids))
        counts = np.bincount(np.concatenate([row[PROMPT_TOKENS:] for row in ids]), minlength=VOCABULARY_SIZE)
        tokens = VerifierTokens(
            token_ids=SPECIAL,
            vocabulary_size=VOCABULARY_SIZE,
            eos_ids=(SPECIAL["<|im_end|>"],),
            tokenizer_sha256="0" * 64,
            model_type="llama",
        )
        write_verifier_tokens(self.files.dataset("B1_glaive").verifier_tokens, tokens)
        frequencies = write_token_frequencies(self.files.corpus, {"B1_glaive": counts})
        write_manifest(
            self.files.manifest("merge"),
            stage="merge",
            edition="main",
            dataset=None,
            fingerprint="merge",
            inputs=[],
            outputs=[describe_output(path) for path in (*sorted(dataset.iterdir()), *frequencies)],
            counts={
                "rows": len(ids),
                "train_rows": train_rows,
                "tokens": sum(map(len, ids)),
                "response_tokens": int(counts.sum()),
                "longest_row_tokens": max(map(len, ids)),
                "corpus_fingerprint": fingerprint_of(ids),
                "datasets": {"B1_glaive": {"rows": len(ids)}},
            },
        )

    def vocabulary(self, ids: list[list[int]]) -> None:
        frequencies = {"B1_glaive": {token: 1 for row in ids for token in row}}
        chosen = choose(
            frequencies, size=32, forced=[1], vocabulary_size=VOCABULARY_SIZE, corpus_fingerprint=fingerprint_of(ids)
        )
        paths = write_draft_vocabulary(self.files.vocabulary, chosen, {"coverage": 0.8})
        write_manifest(
            self.files.manifest("vocabulary"),
            stage="vocabulary",
            edition="main",
            dataset=None,
            fingerprint="vocabulary",
            inputs=[],
            outputs=[describe_output(path) for path in paths],
            counts={"corpus_fingerprint": fingerprint_of(ids), "size": 32, "coverage": 0.8},
        )

    def capture(self, ids: list[list[int]], seed: int = 0) -> None:
        torch.manual_seed(seed)
        folder, indexed = self.files.hidden_states, []
        head = load_file(self.verifier / "model.safetensors")["lm_head.weight"]
        for row, tokens in enumerate(ids):
            name = state_name(f"B1/{row}")
            path = state_path(self.files.states, name)
            states = torch.randn(len(tokens), len(LAYERS) + 1, HIDDEN, dtype=torch.bfloat16)
            states[:, -1] = head[torch.tensor([*tokens[1:], 0])]  # the norm's weights are ones
            write_states(path, token_ids=torch.tensor(tokens), hidden_states=states)
            indexed.append(
                IndexedState(
                    row=row,
                    sample_id=f"B1/{row}",
                    file=str(path.relative_to(folder)),
                    bytes=path.stat().st_size,
                    tokens=len(tokens),
                    token_ids_sha256=token_ids_sha256(np.asarray(tokens)),
                )
            )
        link_rows(folder, self.files.states, [state_name(state.sample_id) for state in indexed])
        write_index(folder / INDEX_FILE, indexed)
        write_json(folder / IDENTITY_FILE, {"verifier": checkpoint_fingerprint(self.verifier)})
        write_manifest(
            self.files.manifest("capture"),
            stage="capture",
            edition="main",
            dataset=None,
            fingerprint=fingerprint_of([ids, seed]),
            inputs=[],
            outputs=[describe_output(folder / INDEX_FILE, len(indexed))],
            counts={"corpus_fingerprint": fingerprint_of(ids), "layers": list(LAYERS), "parity": None},
        )

    def messages(self, kind: str = "progress") -> list[str]:
        lines = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [line["message"] for line in lines if line["type"] == kind]


def response(ids: list[int]) -> list[int]:
    """``ids`` with the tokens around reasoning and answer in their places."""
    ids[2:4] = [SPECIAL["<|im_middle|>"], SPECIAL["<think>"]]
    ids[-4], ids[-1] = SPECIAL["</think>"], SPECIAL["<|im_end|>"]
    return ids


@pytest.fixture
def edition(tmp_path: Path, verifier: Path) -> Edition:
    return Edition(tmp_path, verifier)
