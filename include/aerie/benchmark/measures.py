"""The arithmetic of the benchmark, without a server.

Acceptance length is SGLang's: completion tokens / verify steps, summed over requests before dividing. The token that
the verifier adds to each step is counted, and so is a request's first token, which no step verified. Acceptance rate is
accepted / proposed draft tokens. Every figure is from ``meta_info`` of each request: the server's gauge covers only its
last logging window.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.errors import Failed

DEFINITION = (
    "acceptance length = completion tokens / verify steps, summed over requests before dividing; the verifier's own "
    "token of each step is counted; greedy decoding"
)


class Verification(BaseModel):
    """What speculation came to in one request, under SGLang's names in ``meta_info``.

    ``histogram[k]`` counts the verify steps that accepted exactly k draft tokens.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    steps: Annotated[int, Field(gt=0, strict=True, alias="spec_verify_ct")]
    accepted: Annotated[int, Field(ge=0, strict=True, alias="spec_num_correct_drafts")]
    proposed: Annotated[int, Field(ge=0, strict=True, alias="spec_num_proposed_drafts")]
    histogram: Annotated[tuple[int, ...], Field(alias="spec_correct_drafts_histogram")]


class Measured(BaseModel):
    """One request as it was answered; ``verification`` None where nothing was verified."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    sample_id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    completion_tokens: int
    finish_reason: str
    verification: Verification | None


class DatasetRun(BaseModel):
    """The requests of one data set and the seconds from the first sent to the last answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    requests: tuple[Measured, ...]

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(request.completion_tokens for request in self.requests)


Runs = Mapping[str, DatasetRun]
"""Data set to its run."""


def verification_of(meta_info: Mapping[str, Any], *, completion_tokens: int, sample_id: str) -> Verification | None:
    """What speculation came to in a request served with a drafter.

    None for an answer of a single token, which comes from the prompt's own pass: SGLang then reports nothing.

    Raises:
        Failed: the server did not say; the message names the fields and what it said.
    """
    if completion_tokens == 1:
        return None
    try:
        return Verification.model_validate(meta_info)
    except ValidationError as error:
        fields = ", ".join(
            f"meta_info.{one['loc'][0]}: {one['msg'].lower()}" for one in error.errors(include_url=False)
        )
        raise Failed(
            f"sample {sample_id}: {fields}; does the server run with the drafter? It said "
            f"{', '.join(sorted(meta_info))}"
        ) from error


def acceptance_length(requests: Iterable[Measured]) -> float | None:
    """Pooled acceptance length; None when nothing was verified."""
    pairs = [(request.completion_tokens, request.verification.steps) for request in requests if request.verification]
    return sum(tokens for tokens, _ in pairs) / sum(steps for _, steps in pairs) if pairs else None


def acceptance_rate(requests: Iterable[Measured]) -> float | None:
    """Accepted / proposed draft tokens, pooled; None when nothing was proposed."""
    verifications = [request.verification for request in requests if request.verification]
    proposed = sum(one.proposed for one in verifications)
    return sum(one.accepted for one in verifications) / proposed if proposed else None


def acceptance_by_position(requests: Iterable[Measured]) -> list[float]:
    """Share of verify steps that accepted at least the first, the second, ... draft token."""
    steps_by_accepted: list[int] = []
    for histogram in (request.verification.histogram for request in requests if request.verification):
        steps_by_accepted += [0] * (len(histogram) - len(steps_by_accepted))
        for accepted, steps in enumerate(histogram):
            steps_by_accepted[accepted] += steps
    total = sum(steps_by_accepted)
    return [round(sum(steps_by_accepted[position:]) / total, 4) for position in range(1, len(steps_by_accepted))]


def tokens_per_second(runs: Iterable[DatasetRun]) -> float:
    """Completion tokens over the seconds in which requests were running."""
    listed = list(runs)
    return sum(run.tokens for run in listed) / sum(run.seconds for run in listed)


@dataclass(frozen=True)
class Divergence:
    """Where two greedy outputs for one prompt first differ, and the token of each there; None where one has ended."""

    dataset: str
    sample_id: str
    position: int
    own_token: int | None
    other_token: int | None


def divergences(own: Runs, other: Runs) -> list[Divergence]:
    """Requests of ``other`` whose output is not that of ``own``.

    Raises:
        Failed: the two runs are not of the same prompts.
    """
    found = []
    for dataset, run in other.items():
        expected = {request.sample_id: request.output_ids for request in own[dataset].requests}
        if expected.keys() != {request.sample_id for request in run.requests}:
            raise Failed(f"data set {dataset}: the runs with and without the drafter are of different prompts")
        for request in run.requests:
            left, right = expected[request.sample_id], request.output_ids
            position = first_difference(left, right)
            if position is not None:
                tokens = (ids[position] if position < len(ids) else None for ids in (left, right))
                found.append(Divergence(dataset, request.sample_id, position, *tokens))
    return found


def of_prompts(runs: Runs, others: Runs) -> dict[str, DatasetRun]:
    """The requests of ``runs`` whose prompts ``others`` have too; their seconds are of the whole run."""
    wanted = {(dataset, request.sample_id) for dataset, run in others.items() for request in run.requests}
    return {
        dataset: run.model_copy(
            update={"requests": tuple(one for one in run.requests if (dataset, one.sample_id) in wanted)}
        )
        for dataset, run in runs.items()
        if dataset in others
    }


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """First position at which two sequences differ, None when they are equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def summarise(without: Runs | None, untrained: Runs | None, trained: Runs) -> dict[str, Any]:
    """Figures over all requests and by data set, as they stand in results and manifest.

    What has nothing to be compared with is None: speed-up and losslessness, where nothing ran ``without`` the drafter.
    """
    different = None if without is None else divergences(without, trained)
    return {
        **_figures(None if without is None else list(without.values()), list(trained.values())),
        "acceptance_length_untrained": pooled(untrained.values()) if untrained else None,
        "lossless": None if different is None else not different,
        "divergences": [vars(divergence) for divergence in different or ()],
        "per_dataset": {
            key: {
                **_figures(None if without is None else [without[key]], [run]),
                "acceptance_length_untrained": pooled([untrained[key]]) if untrained and key in untrained else None,
                "lossless": None if different is None else all(one.dataset != key for one in different),
            }
            for key, run in trained.items()
        },
    }


def _figures(without: Sequence[DatasetRun] | None, trained: Sequence[DatasetRun]) -> dict[str, Any]:
    requests = [request for run in trained for request in run.requests]
    speed, own_speed = tokens_per_second(trained), None if without is None else tokens_per_second(without)
    return {
        "acceptance_length": acceptance_length(requests),
        "acceptance_rate": acceptance_rate(requests),
        "acceptance_by_position": acceptance_by_position(requests),
        "prompts": len(requests),
        "completion_tokens": sum(run.tokens for run in trained),
        "cut_by_cap": sum(request.finish_reason == "length" for request in requests),
        "tokens_per_second": round(speed, 1),
        "tokens_per_second_without": None if own_speed is None else round(own_speed, 1),
        "speed_up": None if own_speed is None else round(speed / own_speed, 3),
    }


def pooled(runs: Iterable[DatasetRun]) -> float | None:
    """Acceptance length of all requests of the runs."""
    return acceptance_length(request for run in runs for request in run.requests)
