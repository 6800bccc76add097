"""The texts of the server's readiness probe, as token ids (model environment)."""

from datetime import date
from pathlib import Path

from pydantic import ValidationError

from aerie.artefacts.files import write_text
from aerie.errors import BadInput
from aerie.prompts.checkpoint import load_verifier
from aerie.prompts.rendering import Renderer
from aerie.serving.probing import LONGEST_PASSAGE_TOKENS, ProbeTexts
from aerie.settings.pipeline import VerifierSettings

QUESTION = "What is 7 plus 5? Answer with the number alone."
"""A verifier that reasons thinks about it for a few dozen to a few hundred tokens."""

PASSAGE = Path(__file__).with_name("probe_passage.txt")
SOME_DAY = date(2026, 1, 1)
"""Today, to a template that writes the date into prompts, where the settings name no day: the probe is no data."""


def write_probe_texts(verifier_path: Path, out: Path) -> None:
    """Render the question and tokenise the passage of the verifier whose settings are in a file.

    Raises:
        BadInput: the file is no verifier's settings, or the checkpoint does not fit its profile.
    """
    try:
        settings = VerifierSettings.model_validate_json(verifier_path.read_bytes())
    except (OSError, ValidationError) as error:
        raise BadInput(f"{verifier_path}: not the settings of a verifier: {error}") from error
    verifier = load_verifier(settings)
    question = Renderer(verifier, settings.prompt_date or SOME_DAY).render([{"role": "user", "content": QUESTION}], ())
    # With the special tokens that the tokenizer puts at the beginning of a text, as models were trained.
    passage = verifier.tokenizer.encode(PASSAGE.read_text(encoding="utf-8"))
    texts = ProbeTexts(
        question_ids=tuple(question), passage_ids=tuple(passage[:LONGEST_PASSAGE_TOKENS]), tokens=verifier.tokens
    )
    write_text(out, texts.model_dump_json() + "\n")
