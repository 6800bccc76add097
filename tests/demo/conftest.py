from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

DEMO = Path(__file__).resolve().parents[2] / "demo"


@pytest.fixture(scope="session")
def verifier() -> Path:
    return DEMO / "tiny_verifier"


@pytest.fixture(scope="session")
def sources() -> Path:
    return DEMO / "sources"


@pytest.fixture(scope="session")
def tokenizer(verifier: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(verifier, local_files_only=True)
