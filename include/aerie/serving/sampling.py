"""Sampling parameters as SGLang takes them."""

from collections.abc import Sequence
from typing import Any

from aerie.settings.profile import Sampling


def sampling_parameters(sampling: Sampling, *, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Every sampling parameter that affects tokens, so that no default of server or checkpoint has a say."""
    return {
        **sampling.model_dump(),
        "min_new_tokens": 0,
        "n": 1,
        "ignore_eos": False,
        "stop_token_ids": list(stop_token_ids),
        # These two act on text, which nothing reads.
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
