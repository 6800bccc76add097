from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.artefacts.manifest import describe_output, write_manifest
from aerie.artefacts.prompts import Prompt, Split, write_prompts
from aerie.artefacts.samples import Sample, write_samples
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.settings.pipeline import PipelineSettings, is_tokenised
from aerie.stages import Events, StageRequest

VOCABULARY_SIZE = 64
FORCED = (
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
VERIFIER = VerifierTokens(
    token_ids={name: VOCABULARY_SIZE - 1 - i for i, name in enumerate(FORCED)},
    vocabulary_size=VOCABULARY_SIZE,
    eos_ids=(VOCABULARY_SIZE - 1,),
    tokenizer_sha256="0" * 64,
    model_type="llama",
)


def sample(
    sample_id: str,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    dataset: str = "B1_glaive",
    split: str = "train",
    conversation_id: str | None = None,
) -> Sample:
    return Sample(
        sample_id=sample_id,
        conversation_id=conversation_id or sample_id,
        dataset=dataset,
        split=split,
        input_ids=[*prompt, *response],
        loss_mask=[0] * len(prompt) + [1] * len(response),
        prompt_tokens=len(prompt),
        response_tokens=len(response),
        reasoning_tokens=0,
        flags=[],
        source_revision="r1",
        edition="main",
        licence="apache-2.0",
    )


def dataset_document(key: str) -> dict[str, Any]:
    source = {"path": "x", "licence": "mit"}
    if is_tokenised(key):
        return {"kind": "tokenised", "source": {"reader": "tokenised", **source}}
    return {"source": {"reader": "any", **source}}


class Edition:
    """An edition on disk, as ``validate`` leaves it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events = Events(root / "events.jsonl")

    def request(
        self,
        *,
        datasets: Iterable[str] = ("B1_glaive", "B2_opencodeinstruct"),
        selected: tuple[str, ...] = (),
        force: bool = False,
        **settings: Any,
    ) -> StageRequest:
        document = {
            "name": "test",
            "verifier": {"path": self.root / "verifier", "profile": "demo"},
            "serving": {"context_length": 128},
            "datasets": {key: dataset_document(key) for key in datasets},
            "corpus": {"maximum_length": 32},
            "vocabulary": {"size": 24, "minimum_coverage": 0.1},
            "training": {"epochs": 1, "sequence_length": 64},
            "publish": {"folder": self.root / "published"},
            **settings,
        }
        return StageRequest(
            settings=PipelineSettings.model_validate(document),
            data_root=self.root / "data",
            server_folder=self.root / "server",
            edition="main",
            selected=selected,
            run_id="r",
            force=force,
        )

    def prepared(self, dataset: str, prompts: Mapping[str, tuple[Split, Sequence[int]]]) -> None:
        """Write prompts, split and ids by sample id, as ``prepare`` does; one without ids is skipped."""
        path = self.request().files.dataset(dataset).prompts
        path.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(
            path,
            (
                Prompt(name, name, 0, split, list(ids), None, rank, None if ids else "prompt_too_long")
                for rank, (name, (split, ids)) in enumerate(prompts.items())
            ),
        )

    def validated(self, dataset: str, samples: Iterable[Sample], verifier: VerifierTokens = VERIFIER) -> None:
        samples = list(samples)
        files = self.request().files.dataset(dataset)
        files.folder.mkdir(parents=True, exist_ok=True)
        rows = write_samples(files.samples, (replace(row, dataset=dataset) for row in samples))
        if not is_tokenised(dataset):
            self.prepared(dataset, {row.sample_id: (row.split, row.input_ids[: row.prompt_tokens]) for row in samples})
        write_verifier_tokens(files.verifier_tokens, verifier)
        write_manifest(
            files.manifest("validate"),
            stage="validate",
            edition="main",
            dataset=dataset,
            fingerprint="f",
            inputs=[],
            outputs=[describe_output(files.samples, rows)],
            counts={},
        )


@pytest.fixture
def edition(tmp_path: Path) -> Edition:
    return Edition(tmp_path)


@pytest.fixture
def two_datasets(edition: Edition) -> Callable[..., Edition]:
    def make(rows: int = 40) -> Edition:
        for number, dataset in enumerate(("B1_glaive", "B2_opencodeinstruct")):
            edition.validated(
                dataset,
                (
                    sample(
                        f"{dataset}-{i}",
                        [number, i % 40, 1 + i // 40],
                        [7, 8, 9, i % 50][: 1 + i % 4],
                        split="validation" if i % 5 == 0 else "train",
                    )
                    for i in range(rows)
                ),
            )
        return edition

    return make
