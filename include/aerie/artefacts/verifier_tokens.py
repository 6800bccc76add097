"""``verifier.json``: the verifier's token ids, for stages that run without a tokenizer."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.artefacts.files import write_json
from aerie.errors import BadInput


class VerifierTokens(BaseModel):
    """What the checkpoint's own tokenizer and configuration say.

    ``token_ids`` holds every added token of the tokenizer and every special token that the profile names;
    ``text_ids``, the ids of the texts of ordinary tokens that it names. ``vocabulary_size`` counts rows of the model's
    embedding: ids lie in ``[0, vocabulary_size)``. ``tokenizer_sha256`` is of the vocabulary file (``tokenizer.json``,
    else ``tiktoken.model`` or ``tokenizer.model``). ``whitespace_ids`` are the ids whose text is only white space:
    reasoning that holds nothing else is empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: Mapping[str, int]
    vocabulary_size: int = Field(gt=0)
    eos_ids: tuple[int, ...]
    tokenizer_sha256: str
    model_type: str
    whitespace_ids: tuple[int, ...] = ()
    text_ids: Mapping[str, tuple[int, ...]] = {}


def write_verifier_tokens(path: Path, tokens: VerifierTokens) -> None:
    """Write ``tokens`` to ``path`` atomically."""
    write_json(path, tokens.model_dump(mode="json"))


def read_verifier_tokens(path: Path) -> VerifierTokens:
    """Read what ``write_verifier_tokens`` wrote.

    Raises:
        BadInput: the file is missing or is not such a file.
    """
    try:
        return VerifierTokens.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path}: not there; run stage prepare (or import) of the data set first") from None
    except ValidationError as error:
        raise BadInput(f"{path}: not a description of the verifier's tokens: {error}") from error
