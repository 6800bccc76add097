"""Responses as text for people: a step of its own, because only the model environment has the tokenizer."""

from pathlib import Path

from pydantic import ValidationError

from aerie.artefacts.previews import write_previews
from aerie.artefacts.response_log import Response
from aerie.artefacts.verifier_tokens import read_verifier_tokens
from aerie.boundary.grammar import grammar_of_verifier
from aerie.boundary.rows import GeneratedRows
from aerie.boundary.rules import check_drop_flags
from aerie.boundary.stage import load_decoder, preview_of, under_policy
from aerie.errors import BadInput
from aerie.stages import StageRequest


def decode_file(request: Path, responses: Path, previews: Path) -> None:
    """Judge and decode responses of one data set.

    Args:
        request: a stage request that names the data set.
        responses: responses as JSON lines, any number of one sample.
        previews: where to write them decoded, in the same order.

    Raises:
        BadInput: a file is missing or not what it should be, or the checkpoint's tokenizer is another one.
    """
    try:
        asked = StageRequest.model_validate_json(request.read_bytes())
        answers = [Response.model_validate_json(line) for line in responses.read_bytes().splitlines()]
    except (OSError, ValidationError) as error:
        raise BadInput(f"{request}, {responses}: not a request and its responses: {error}") from error
    files = asked.files.dataset(str(asked.dataset))
    verifier = asked.settings.verifier
    tokens = read_verifier_tokens(files.verifier_tokens)
    grammar = grammar_of_verifier(verifier.load_profile(), tokens)
    decode = load_decoder(verifier, tokens, files.verifier_tokens)
    ids = {answer.sample_id for answer in answers}
    rows = GeneratedRows(files.prompts, files.responses, grammar, decode, sample_ids=ids)
    drop_flags = check_drop_flags(asked.dataset_settings.drop_flags)
    judged = (under_policy(rows.judge(answer), drop_flags) for answer in answers)
    write_previews(previews, (preview_of(row, decode) for row in judged))
