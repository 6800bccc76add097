"""What a server's readiness probe asks: a known question and a fixed passage, as the verifier's own token ids.

Only the model environment has the verifier's tokenizer: a process there makes the texts once for a verifier, and they
are kept in the server's folder.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError

from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.boundary import Grammar, grammar_of_verifier
from aerie.errors import BadInput, Failed
from aerie.serving.sampling import sampling_parameters
from aerie.settings.machine import python_of, variables_of
from aerie.settings.pipeline import PipelineSettings, VerifierSettings
from aerie.settings.profile import Frozen, Profile

MAKING_SECONDS = 300.0
LONGEST_WORDS_CHARACTERS = 500
LONGEST_PASSAGE_TOKENS = 256
"""The logits of the passage are in memory at once: 160 MiB where the vocabulary is large."""


class ProbeTexts(Frozen):
    """What the model environment makes for a verifier, kept in a file.

    ``question_ids`` is a prompt, rendered as prompts of data are; ``passage_ids`` a text of a few hundred tokens.
    """

    question_ids: tuple[NonNegativeInt, ...] = Field(min_length=1)
    passage_ids: tuple[NonNegativeInt, ...] = Field(min_length=8)
    tokens: VerifierTokens


class Probing(Frozen):
    """The texts, and how the answers are judged. ``sampling`` is sent with the question, but for its cap.

    ``logprob_tolerance_nats`` is by how much the passage's mean log-probability may differ from the first launch's.
    """

    texts: ProbeTexts
    profile: Profile
    sampling: Mapping[str, Any]
    logprob_tolerance_nats: float

    @property
    def grammar(self) -> Grammar:
        """The verifier's compiled profile."""
        return grammar_of_verifier(self.profile, self.texts.tokens)


def probing_of(settings: PipelineSettings, folder: Path) -> Probing:
    """How a server of the settings' verifier is probed.

    Args:
        settings: the pipeline's configuration.
        folder: the server's; the texts are kept in it.

    Raises:
        BadInput: there is no model environment, or the verifier's tokenizer and profile do not fit.
        Failed: the process that makes the texts did not end as it should.
    """
    texts, profile = _texts_of(settings.verifier, folder), settings.verifier.load_profile()
    stop_ids = [texts.tokens.token_ids[token] for token in profile.end_of_turn]
    return Probing(
        texts=texts,
        profile=profile,
        sampling=sampling_parameters(settings.load_sampling(), stop_token_ids=stop_ids),
        logprob_tolerance_nats=settings.serving.logprob_tolerance_nats,
    )


def _texts_of(verifier: VerifierSettings, folder: Path) -> ProbeTexts:
    path = folder / "probe_texts" / f"{_key(verifier)[:16]}.json"
    if not path.exists():
        _make(verifier, path)
    try:
        return ProbeTexts.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}; remove it, and it is made again") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BadInput(f"{path}: not the texts of a probe: {first['msg']}; remove it, and it is made again") from error


def _key(verifier: VerifierSettings) -> str:
    """Changes with the verifier's settings and profile, and with any file beside its weights, and with this code."""
    try:
        files = {
            path.name: [path.stat().st_size, path.stat().st_mtime_ns]
            for path in verifier.path.iterdir()
            if path.is_file() and path.suffix != ".safetensors"
        }
    except OSError as error:
        raise BadInput(f"verifier.path {verifier.path}: cannot be read: {error.strerror}") from error
    ours = {path.name: path.read_text(encoding="utf-8") for path in _sources()}
    profile = verifier.load_profile().model_dump(mode="json")
    return fingerprint_of({"verifier": verifier.model_dump(mode="json"), "profile": profile, "files": files, **ours})


def _sources() -> tuple[Path, ...]:
    prompts = Path(__file__).parents[1] / "prompts"
    return (prompts / "probe_texts.py", prompts / "probe_passage.txt")


def _make(verifier: VerifierSettings, path: Path) -> None:
    try:
        python = python_of("model")
    except BadInput as error:
        raise BadInput(f"{error}: the verifier's tokenizer, which the server's probe needs, is read there") from error
    with tempfile.TemporaryDirectory(prefix="aerie-probe-") as name:
        asked = Path(name) / "verifier.json"
        asked.write_text(verifier.model_dump_json(), encoding="utf-8")
        command = [str(python), "-m", "aerie", "probe-texts", "--verifier", str(asked), "--out", str(path)]
        environment = {**variables_of("model"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=MAKING_SECONDS, env=environment
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"making the probe's texts took longer than {MAKING_SECONDS:.0f} s: {command}") from error
    # An error of ours is what follows the last "aerie: ", on as many lines as another library's message has.
    said = " ".join(done.stderr.strip().rpartition("aerie: ")[2].split())
    if done.returncode == BadInput.exit_code:
        raise BadInput(said)
    if done.returncode:
        said = said[-LONGEST_WORDS_CHARACTERS:] or "it said nothing"
        raise Failed(f"making the probe's texts ended with status {done.returncode}: {said}")
