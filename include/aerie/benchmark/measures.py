"""The arithmetic of the benchmark, without a server.

Acceptance length is SGLang's: completion tokens / verify steps, summed over requests before dividing. The token that
the verifier adds to each step is counted, and so is a request's first token, which no step verified. Acceptance rate is
accepted / proposed draft tokens. Every figure is from ``meta_info`` of each request: the server's gauge covers only its
last logging window.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.errors import Failed

Variant = Literal["without", "untrained", "trained"]
"""The server without a drafter, with the drafter before its first training step, and with the drafter."""

NEVER_ACCEPTS = 1.01
"""At or below this a drafter's proposals are never taken: something is wired wrongly, whatever the threshold."""


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
    """Where greedy output with the drafter first differs from the verifier's own."""

    dataset: str
    sample_id: str
    position: int


def divergences(without: Runs, trained: Runs) -> list[Divergence]:
    """Requests whose output with the drafter is not the verifier's own.

    Raises:
        Failed: the two runs are not of the same prompts.
    """
    found = []
    for dataset, run in trained.items():
        own = {request.sample_id: request.output_ids for request in without[dataset].requests}
        if own.keys() != {request.sample_id for request in run.requests}:
            raise Failed(f"data set {dataset}: the runs with and without the drafter are of different prompts")
        for request in run.requests:
            position = first_difference(own[request.sample_id], request.output_ids)
            if position is not None:
                found.append(Divergence(dataset, request.sample_id, position))
    return found


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
        "acceptance_length_untrained": _pooled(untrained.values()) if untrained else None,
        "lossless": None if different is None else not different,
        "divergences": [vars(divergence) for divergence in different or ()],
        "per_dataset": {
            key: {
                **_figures(None if without is None else [without[key]], [run]),
                "acceptance_length_untrained": _pooled([untrained[key]]) if untrained and key in untrained else None,
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


def _pooled(runs: Iterable[DatasetRun]) -> float | None:
    return acceptance_length(request for run in runs for request in run.requests)


@dataclass(frozen=True)
class Circumstances:
    """What the checklist of a failed gate is judged by."""

    captured_layers: Sequence[int]
    serving_layer_ids: Sequence[int]
    algorithm: str | None
    vocabulary_coverage: float
    estimated_acceptance_length: float | None
    parity: str


def require_gates(
    figures: Mapping[str, Any], *, minimum_acceptance_length: float, exact: bool, circumstances: Circumstances
) -> None:
    """Fail a drafter that is not worth serving, or that changes what the verifier says.

    Args:
        figures: as ``summarise`` gives them.
        minimum_acceptance_length: the threshold.
        exact: whether outputs must be identical, as in float32.
        circumstances: what the checklist is judged by.

    Raises:
        Failed: with the figures and the checklist of usual causes.
    """
    length = figures["acceptance_length"]
    if length <= NEVER_ACCEPTS:
        raise Failed(
            f"acceptance length {length:.3f}: the drafter's proposals are practically never accepted\n"
            + checklist(circumstances, length)
        )
    if length < minimum_acceptance_length:
        raise Failed(
            f"acceptance length {length:.3f} is below benchmark.minimum_acceptance_length "
            f"{minimum_acceptance_length:g}\n" + checklist(circumstances, length)
        )
    if exact and not figures["lossless"]:
        first = figures["divergences"][0]
        raise Failed(
            f"greedy output with the drafter differs from the verifier's own for {len(figures['divergences'])} of "
            f"{figures['prompts']} prompts, first at token {first['position']} of sample {first['sample_id']} "
            f"({first['dataset']}): in float32 they must be identical; the server's verification is wrong"
        )


def checklist(circumstances: Circumstances, length: float) -> str:
    """The usual causes of a low acceptance length, each with what this run says about it."""
    promised = circumstances.estimated_acceptance_length
    validation = "no validation to compare with" if promised is None else f"validation promised {promised:.2f}"
    causes = {
        "layer ids": f"captured entering layers {list(circumstances.captured_layers)}, served as "
        f"{list(circumstances.serving_layer_ids)} (SGLang numbers outputs: one less)",
        "norm position": f"the last stored state must be before the final norm; {circumstances.parity}",
        "vocabulary mapping": f"the draft vocabulary holds {circumstances.vocabulary_coverage:.2%} of the tokens "
        "that the verifier produced here",
        "algorithm name": f"the server runs {circumstances.algorithm} (EAGLE instead of EAGLE3 loads and gives 1.0)",
        "boundary broken in the data": f"{validation}, served {length:.2f}: rows broken alike in training and "
        "validation show only here; read the previews of the data sets",
        "sliding window": "the export refuses one, so a server flag (--speculative-draft-window-size) must have set it",
        "too little training": "compare first and last loss, and the validation of each epoch",
    }
    return "\n".join(["usual causes, and what this run says:", *(f"- {name}: {said}" for name, said in causes.items())])
