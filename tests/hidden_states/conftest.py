import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from aerie.artefacts.corpus import CORPUS_SCHEMA, CorpusWriter
from aerie.artefacts.files import atomic_folder, fingerprint_of
from aerie.artefacts.manifest import describe_output, write_manifest
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest

VOCABULARY_SIZE = 128
DEPTH = 8
DATASET, END = "B1_glaive", 1
TOKENS = VerifierTokens(
    token_ids={"<|im_end|>": END},
    vocabulary_size=VOCABULARY_SIZE,
    eos_ids=(END,),
    tokenizer_sha256="0" * 64,
    model_type="llama",
)


@pytest.fixture(scope="session")
def latent_attention_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 (latent attention, experts) of eight layers with random weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    config = DeepseekV3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        max_position_embeddings=512,
        rope_scaling={**yarn, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("latent")
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    # What SGLang reads and transformers does not write.
    document |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 10000.0}
    document["rope_scaling"] = config.rope_parameters
    (folder / "config.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of eight layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("verifier")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Edition:
    """An edition on disk, as ``merge`` leaves it.

    Its rows are of a family that neither reasons nor names what its prompts end with: any ids are a whole row, up to
    the first ``END`` behind the first.
    """

    def __init__(self, root: Path, verifier: Path) -> None:
        self.root = root
        self.verifier = verifier
        self.events_path = root / "events.jsonl"
        self.events = Events(self.events_path)

    def request(self, *, force: bool = False, hidden_states: dict[str, Any] | None = None, **settings: Any):
        document = {
            "name": "test",
            "verifier": {"path": self.verifier, "profile": "smollm2", "dtype": "float32"},
            "serving": {
                "device": "cpu",
                "context_length": 512,
                "mem_fraction_static": 0.2,
                "max_total_tokens": 8192,
                "chunked_prefill_size": 32,
                "max_running_requests": 32,
                "start_timeout_seconds": 900,
                "extra_arguments": ["--skip-tokenizer-init", "--enable-mixed-chunk"],
            },
            "datasets": {DATASET: {"source": {"reader": "any", "path": "x", "licence": "mit"}}},
            "generation": {"progress_seconds": 0.5, "request_timeout_seconds": 120},
            "corpus": {"maximum_length": 256},
            "vocabulary": {"size": 24},
            "hidden_states": {"dtype": "float32", "free_share": 0.0, **(hidden_states or {})},
            "training": {"epochs": 1, "sequence_length": 64},
            "publish": {"folder": self.root / "published"},
            **settings,
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
    def files(self):
        return self.request().files

    @property
    def states(self) -> Path:
        return self.files.states

    def merged(self, rows: Sequence[list[int]], names: Sequence[str] | None = None) -> None:
        names = names or [f"B1/{row}" for row in range(len(rows))]
        table = {
            "input_ids": rows,
            "loss_mask": [[0, *[1] * (len(row) - 1)] for row in rows],
            "seq_len": [len(row) for row in rows],
            "sample_id": names,
            "dataset": [DATASET] * len(rows),
            **{c: ["x"] * len(rows) for c in ("conversation_id", "source_revision", "edition", "licence")},
            "split": ["train"] * len(rows),
        }
        folder = self.files.corpus / "dataset"
        with atomic_folder(folder) as temporary:
            writer = CorpusWriter(temporary)
            writer.write_shard(pa.table(table, schema=CORPUS_SCHEMA))
            writer.close(fingerprint="f" * 64)
        write_verifier_tokens(self.files.dataset(DATASET).verifier_tokens, TOKENS)
        write_manifest(
            self.files.manifest("merge"),
            stage="merge",
            edition="main",
            dataset=None,
            fingerprint="f",
            inputs=[],
            outputs=[describe_output(path) for path in sorted(folder.iterdir())],
            counts={
                "corpus_fingerprint": fingerprint_of(rows),
                "rows": len(rows),
                "tokens": sum(map(len, rows)),
                "longest_row_tokens": max(map(len, rows)),
            },
        )

    def progress(self) -> list[str]:
        lines = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [line["message"] for line in lines if line["type"] == "progress"]


@pytest.fixture
def edition(tmp_path: Path, verifier: Path) -> Edition:
    return Edition(tmp_path, verifier)


def random_rows(count: int, *, longest: int) -> list[list[int]]:
    """Rows of 2 to ``longest`` tokens; every other one begins as the row before, as prompts of one template do."""
    random = np.random.default_rng(0)
    rows: list[list[int]] = []
    for number in range(count):
        row = random.integers(2, VOCABULARY_SIZE, random.integers(2, longest + 1)).tolist()
        rows.append(rows[-1][: len(row) // 2] + row if number % 2 and rows else row)
    return [row[:longest] for row in rows]
