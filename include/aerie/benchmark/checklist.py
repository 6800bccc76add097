"""The usual causes of a drafter that is not accepted, each judged by what this run knows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aerie.benchmark.boundaries import Boundaries
from aerie.benchmark.estimate import Estimate

Verdict = Literal["ok", "suspect", "not known"]

ALGORITHM = "EAGLE3"
"""``EAGLE`` instead of it loads, and gives an acceptance length of exactly 1.0."""

LEAST_OF_PROMISE = 0.75
"""Served below this share of what validation promised: its rows were made otherwise than what is served."""

LEAST_LOSS_GAIN = 0.2
"""A training whose loss fell by less than this share has hardly begun."""

SHARE_APART = 0.2
LENGTH_APART = 2.0
"""Share of rows with a boundary, and factor of the reasoning's median length, by which data may differ from outputs."""


@dataclass(frozen=True)
class Cause:
    """A usual cause, whether this run has it, and by what that is judged."""

    cause: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Circumstances:
    """What the causes are judged by.

    ``captured_layers`` are of the capture, ``exported_layer_ids`` what the export made of them, ``served_layer_ids``
    those in the configuration that the server loads. ``parity`` is the capture's comparison with transformers, None
    where there was none. ``last_slot`` and ``rows`` are what training looked at before it began: what the verifier's
    head makes of the last layer's states, and rows judged again; None where it did not look. ``coverage`` is the share
    of the verifier's outputs here that the draft vocabulary holds, and ``minimum_coverage`` what the vocabulary was to
    have. ``window`` is the server's draft window.
    """

    captured_layers: Sequence[int]
    exported_layer_ids: Sequence[int]
    served_layer_ids: Sequence[int]
    parity: Mapping[str, Any] | None
    last_slot: Mapping[str, Any] | None
    rows: Mapping[str, Any] | None
    coverage: float
    minimum_coverage: float
    algorithm: str | None
    window: int | None
    boundaries: Boundaries | None
    estimate: Estimate | None
    served: float
    first_loss: float
    last_loss: float


def evaluate(known: Circumstances) -> list[Cause]:
    """Every usual cause with its verdict."""
    return [
        Cause("layer ids", *_layers(known)),
        Cause("norm position", *_norm(known)),
        Cause("vocabulary mapping", *_vocabulary(known)),
        Cause("algorithm name", *_algorithm(known)),
        Cause("boundary broken in the data", *_boundary(known)),
        Cause("sliding window", *_window(known)),
        Cause("too little training", *_training(known)),
    ]


def told(causes: Sequence[Cause]) -> str:
    """The checklist as lines, what is suspect first."""
    order = {"suspect": 0, "not known": 1, "ok": 2}
    lines = (f"- {one.verdict}: {one.cause}: {one.evidence}" for one in sorted(causes, key=lambda c: order[c.verdict]))
    return "\n".join(["usual causes, and what this run says:", *lines])


def _layers(known: Circumstances) -> tuple[Verdict, str]:
    captured, served = list(known.captured_layers), list(known.served_layer_ids)
    said = f"captured entering layers {captured}, served as {served} (SGLang numbers outputs: one less)"
    if served != list(known.exported_layer_ids):
        return "suspect", f"{said}, but the export wrote {list(known.exported_layer_ids)}"
    # For some families SGLang shifts ids itself, so that they stay as they were captured.
    if served not in ([layer - 1 for layer in captured], captured):
        return "suspect", f"{said}: neither one less nor the same"
    verdict, compared = _parity(known)
    return verdict, f"{said}; {compared}"


def _norm(known: Circumstances) -> tuple[Verdict, str]:
    verdict, compared = _parity(known)
    said = f"the last stored state must be the verifier's own, before the final norm; {compared}"
    found = known.last_slot
    if found is None:
        return verdict, said
    if found["problem"] is not None:
        return "suspect", f"{said}; {found['problem']}"
    read = f"the verifier's head names {found['agreement']:.0%} of {found['tokens']} response tokens from it"
    return "ok" if verdict == "not known" else verdict, f"{said}; {read}"


def _parity(known: Circumstances) -> tuple[Verdict, str]:
    parity = known.parity
    if parity is None:
        return "not known", "captured states were not compared with transformers (hidden_states.parity_rows is 0)"
    said = (
        f"captured states of {parity['rows']} rows equal transformers', layer by layer, to "
        f"{parity['maximum_relative']:.2g} of their norm (allowed {parity['tolerance']:g})"
    )
    return ("ok" if parity["maximum_relative"] <= parity["tolerance"] else "suspect"), said


def _vocabulary(known: Circumstances) -> tuple[Verdict, str]:
    said = f"the draft vocabulary holds {known.coverage:.2%} of the tokens that the verifier produced here"
    wanted = f"vocabulary.minimum_coverage is {known.minimum_coverage:.0%}"
    return ("ok" if known.coverage >= known.minimum_coverage else "suspect"), f"{said}; {wanted}"


def _algorithm(known: Circumstances) -> tuple[Verdict, str]:
    said = f"the server runs {known.algorithm} (EAGLE instead of EAGLE3 loads and gives 1.0)"
    return ("ok" if known.algorithm == ALGORITHM else "suspect"), said


def _boundary(known: Circumstances) -> tuple[Verdict, str]:
    findings = [*_promise(known), *_rows(known), *_data(known)]
    verdicts = {verdict for verdict, _ in findings}
    if not findings:
        return "not known", "no validation to compare with, and no boundary of one token to look for in the data"
    verdict: Verdict = "suspect" if "suspect" in verdicts else "not known" if "not known" in verdicts else "ok"
    return verdict, "; ".join(said for _, said in findings)


def _promise(known: Circumstances) -> Iterator[tuple[Verdict, str]]:
    if known.estimate is None:
        return
    promised = known.estimate.acceptance_length
    said = f"validation promised {promised:.2f}, served {known.served:.2f}"
    if known.served < promised * LEAST_OF_PROMISE:
        yield "suspect", f"{said}: rows broken alike in training and validation show only here"
    else:
        yield "ok", said


def _rows(known: Circumstances) -> Iterator[tuple[Verdict, str]]:
    found = known.rows
    if found is None:
        return
    if found["problem"] is not None:
        yield "suspect", found["problem"]
    else:
        yield "ok", f"{found['rows']} training rows judged again break no rule"


def _data(known: Circumstances) -> Iterator[tuple[Verdict, str]]:
    found = known.boundaries
    if found is None:
        return
    data, outputs = found.data, found.outputs
    said = (
        f"{found.token} closes the reasoning in {data.share:.0%} of {data.rows} training rows, after a median of "
        f"{data.median_tokens:.0f} tokens; in {outputs.share:.0%} of {outputs.rows} of the verifier's own outputs "
        f"here, after {outputs.median_tokens:.0f}"
    )
    longer, shorter = sorted((data.median_tokens + 1, outputs.median_tokens + 1), reverse=True)
    differs = abs(data.share - outputs.share) > SHARE_APART or longer > shorter * LENGTH_APART
    yield ("suspect" if differs else "ok"), said


def _window(known: Circumstances) -> tuple[Verdict, str]:
    if known.window is not None:
        return "suspect", f"the server drafts in a window of {known.window} (--speculative-draft-window-size)"
    return "ok", "none: the export refuses one, and the server has no draft window"


def _training(known: Circumstances) -> tuple[Verdict, str]:
    said = f"loss {known.first_loss:.3f} to {known.last_loss:.3f}"
    return ("suspect" if known.last_loss > known.first_loss * (1 - LEAST_LOSS_GAIN) else "ok"), said
