"""Records of drafters as ``export`` and ``publish`` write them."""

from datetime import UTC, datetime
from typing import Any

from aerie.artefacts.drafter_record import DrafterRecord

COUNTS = {
    "merge": {"corpus_fingerprint": "c" * 64, "rows": 513, "tokens": 83411, "response_tokens": 37499},
    "vocabulary": {"size": 32000, "coverage": 0.9912},
    "capture": {},
    "train": {
        "layers": [2, 30, 58], "drafter_parameters": 1_000_000, "epochs": 3, "steps": 360, "first_loss": 20.0,
        "last_loss": 1.5, "validation": {"loss": 1.6, "estimated_acceptance_length": 2.5},
    },
}  # fmt: skip
ROW = {"prompts": 8, "acceptance_length": 2.75, "tokens_per_second": 90.0, "tokens_per_second_without": 50.0}
MEASURED = {
    **ROW, "losslessness": {"said": "greedy output identical on 8 prompts"},
    "by_concurrency": [{"concurrency": 8, **ROW}, {"concurrency": 1, **ROW, "acceptance_length": 2.81}],
    "definition": "completion tokens / verify steps", "acceptance_length_untrained": 1.02,
    "settings": {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
    "per_dataset": {"B1_glaive": ROW, "B2_empty": {**ROW, "acceptance_length": None}},
}  # fmt: skip


def record(
    *, fingerprint: str = "f" * 64, verifier: str = "a" * 64, edition: str = "main", **stages: Any
) -> DrafterRecord:
    """A drafter for the model of this fingerprint; ``benchmark`` is one of the stages that may be added."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    source = {"huggingface": "glaiveai/glaive", "revision": "e" * 40, "licence": "apache-2.0", "validated": None}
    document = {
        "edition": edition,
        "fingerprint": fingerprint,
        "verifier": {
            "name": "Kimi-K2.5", "huggingface": "moonshotai/Kimi-K2.5", "revision": "d" * 40, "profile": "kimi-k25",
            "model_type": "kimi_k25", "dtype": "bfloat16", "fingerprint": verifier,
        },
        "sources": {"B1_glaive": source, "A1": {**source, "huggingface": None, "licence": "CC0-1.0"}},
        "training": {"epochs": 3},
        "stages": {
            name: {"fingerprint": name, "finished_at": noon, "counts": counts}
            for name, counts in {**COUNTS, **stages}.items()
        },
        "versions": {"speculators": "0.9.0"},
    }  # fmt: skip
    return DrafterRecord.model_validate(document)
