"""Smaller plans in place of those that ran out of memory.

The keeper records one, and whoever asks for a server of the plan that failed asks for the smaller one from then on: in
a file of the server's folder, by the fingerprint of that plan. Removing it, or changing a setting of the
plan, lets the plan be tried as it was.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from aerie.artefacts.files import write_text
from aerie.errors import BadInput, one_line
from aerie.serving.errors import OutOfMemory, OutOfMemoryInDecode, OutOfMemoryInPrefill
from aerie.serving.plan import ServerPlan
from aerie.serving.server_log import ServerLog
from aerie.settings.profile import Frozen

FRACTION_STEP = 0.05
"""Of a GPU's memory: nearly 5 GB of the reference's 96, where one prefill asked for 2 that were not there."""

TOKENS_SHARE = 0.9
PREFILL_SIZES = (4096, 2048)
REQUESTS_SHARE = 0.5

Change = Mapping[str, float | int]


class Reduction(Frozen):
    """A change of a plan that ran out of memory, and why. ``at`` is in seconds since 1970."""

    reason: str
    change: Change
    before: Mapping[str, float | int | None]
    result_fingerprint: str
    at: float

    def __str__(self) -> str:
        changes = ", ".join(
            f"{name} {value} (instead of {'the default' if self.before[name] is None else self.before[name]})"
            for name, value in self.change.items()
        )
        at = datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"{changes}, because at {at} it ran out of memory: {self.reason}"


_Reductions = TypeAdapter(dict[str, Reduction])


def reductions_path(folder: Path) -> Path:
    """The file of a server's folder."""
    return folder / "reductions.json"


def reduced(folder: Path, plan: ServerPlan) -> tuple[ServerPlan, Reduction | None]:
    """The plan as it is to be served: smaller where it ran out of memory before.

    Raises:
        BadInput: the file is there and cannot be read.
    """
    reduction = _read(folder).get(plan.fingerprint())
    return (plan, None) if reduction is None else (plan.model_copy(update=dict(reduction.change)), reduction)


def reduction_behind(folder: Path, plan: ServerPlan) -> Reduction | None:
    """The reduction that made this plan, None where it is as somebody asked for it.

    Raises:
        BadInput: the file is there and cannot be read.
    """
    fingerprint = plan.fingerprint()
    return next((one for one in _read(folder).values() if one.result_fingerprint == fingerprint), None)


def record(folder: Path, plan: ServerPlan, failure: OutOfMemory, log: ServerLog) -> None:
    """Record the smaller plan that comes after this failure; a plan that was made smaller is not made smaller again.

    Raises:
        BadInput: the file is there and cannot be read.
    """
    if reduction_behind(folder, plan) is not None:
        return
    change = smaller(plan, failure, log)
    reduction = Reduction(
        reason=str(failure),
        change=change,
        before={name: getattr(plan, name) for name in change},
        result_fingerprint=plan.model_copy(update=dict(change)).fingerprint(),
        at=time.time(),
    )
    known = {**_read(folder), plan.fingerprint(): reduction}
    write_text(reductions_path(folder), _Reductions.dump_json(known, indent=2).decode() + "\n")


def smaller(plan: ServerPlan, failure: OutOfMemory, log: ServerLog) -> Change:
    """What to change after running out of memory: the remedy that fits the phase.

    Where the plan leaves a size to SGLang, the log says what it settled on.
    """
    if isinstance(failure, OutOfMemoryInPrefill):
        size = plan.chunked_prefill_size or log.effective.get("chunked_prefill_size")
        fitting = [one for one in PREFILL_SIZES if size is None or one < size]
        if fitting:
            return {"chunked_prefill_size": fitting[0] - fitting[0] % (plan.page_size or 1)}
    if isinstance(failure, OutOfMemoryInDecode):
        running = log.batch.running_requests if log.batch else None
        limits = (plan.max_running_requests, log.effective.get("max_running_requests"), running)
        least = min((limit for limit in limits if limit), default=1)
        if least > 1:
            return {"max_running_requests": int(least * REQUESTS_SHARE)}
    return _less_pool(plan)


def _less_pool(plan: ServerPlan) -> Change:
    fraction = plan.mem_fraction_static
    less = fraction - FRACTION_STEP if fraction > 2 * FRACTION_STEP else fraction / 2
    change: dict[str, float | int] = {"mem_fraction_static": round(less, 4)}
    if plan.max_total_tokens is not None:
        change["max_total_tokens"] = max(1, int(plan.max_total_tokens * TOKENS_SHARE))
    return change


def _read(folder: Path) -> dict[str, Reduction]:
    path = reductions_path(folder)
    try:
        return _Reductions.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadInput(
            f"{path}: not reductions of plans: {one_line(error)}; remove it to try every plan as it is set"
        ) from error
