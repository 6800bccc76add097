"""The whole plan: what is served, on which machine, phase by phase, with commands and a timeline.

One function for the command line, the pipeline's first task and the check before a launch: ``make_plan``.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aerie.artefacts.observations import Observation, read_observations
from aerie.errors import BadInput, one_line
from aerie.hidden_states.protocol import forward_hooks
from aerie.plan_subjects import Subject
from aerie.serving.calibration import STARTUP_BYTES
from aerie.serving.errors import PlanRefused
from aerie.serving.headroom import GIB
from aerie.serving.host import HostFacts
from aerie.serving.launch_plan import SAME_NAMES, believing, free_memory_gib
from aerie.serving.plan import WITH_DRAFTER, DrafterPlan, Phase, ServerPlan, checkpoint_identity
from aerie.serving.plan_inputs import ObservedPool, PlanInputs
from aerie.serving.planning import MemoryPlan, Suggestion, Verdict, plan_memory, require_plausible, suggest, worst
from aerie.serving.prefixes import PrefixOverlap
from aerie.serving.timeline import Measured, Range, Timeline, plan_timeline
from aerie.settings.pipeline import PipelineSettings

PHASES: tuple[Phase, ...] = ("generate", "capture", "benchmark", "deploy")
DEFAULT_PORT = 8000
PLANNED = "planned"
"""Identity of a checkpoint that need not be there: it is in no command."""


@dataclass(frozen=True)
class Machine:
    """GPUs and host memory to plan for; None is not known. ``here`` is this machine as it was found."""

    gpus: int | None = None
    gpu_memory_gib: float | None = None
    host_ram_gb: float | None = None
    source: str = "given"
    here: bool = False

    @classmethod
    def of_facts(cls, facts: HostFacts, *, device: str) -> "Machine":
        """The machine that was asked: its smallest GPU's memory, or a CPU's, without what a start takes of it."""
        available = facts.memory_available_bytes
        available_gb = round(available / 1e9, 1)
        if device == "cpu":
            return cls(0, (available - STARTUP_BYTES["cpu"]) / GIB, available_gb, f"host {facts.hostname}", here=True)
        if not facts.gpus:
            return cls(source=f"host {facts.hostname} has no GPU that NVML sees", here=True)
        source = f"NVML on {facts.hostname}: {len(facts.gpus)} x {facts.gpus[0].name}"
        return cls(len(facts.gpus), free_memory_gib(facts.gpus), available_gb, source, here=True)


@dataclass(frozen=True)
class WholePlan:
    """Every phase that was asked for, the first of which is the plan's face."""

    subject: Subject
    machine: Machine
    phases: Mapping[Phase, MemoryPlan]
    servers: Mapping[Phase, ServerPlan]
    timeline: Timeline | None
    overlap: PrefixOverlap | None = None
    suggestion: Suggestion | None = None
    suggestion_asked: bool = False

    @property
    def face(self) -> MemoryPlan:
        """The first phase."""
        return next(iter(self.phases.values()))

    @property
    def verdict(self) -> Verdict:
        """The worst of the phases' verdicts: a run goes through all of them."""
        return worst(plan.verdict for plan in self.phases.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        """What decides: the sums of the phases with the worst verdict, each named where there are several."""
        decisive = [plan for plan in self.phases.values() if plan.verdict == self.verdict]
        several = len(self.phases) > 1
        return tuple(f"{plan.phase}: {one}" if several else one for plan in decisive for one in plan.reasons)

    def require_fit(self) -> None:
        """Refuse to start anything on a refused plan.

        Raises:
            PlanRefused: with the sums that decide.
        """
        if self.verdict == "refused":
            raise PlanRefused("the plan is refused: " + "; ".join(self.reasons))


def make_plan(
    subject: Subject,
    machine: Machine,
    *,
    phases: Sequence[Phase] = PHASES,
    starts: datetime | None = None,
    lengths: tuple[float | None, float | None] = (None, None),
    rate: Range | None = None,
    measured: Mapping[str, Measured] | None = None,
    observations: Sequence[Observation] = (),
    overlap: PrefixOverlap | None = None,
    suggestion_asked: bool = False,
) -> WholePlan:
    """Plan ``subject`` on ``machine``.

    Args:
        subject: what is served.
        machine: where.
        phases: what the server is for, in order.
        starts: when generation begins (default: now).
        lengths: typical prompt and response tokens; None takes those that the configuration expects, where it does.
        rate: response tokens a second over all requests; None takes the configuration's.
        measured: what data sets have shown so far.
        observations: launches of this model on this host, which are believed before any estimate.
        overlap: how much of the prompts begins as others do.
        suggestion_asked: also look for the largest safe sizes.

    Raises:
        BadInput: too little is known to plan, or a field makes no sense; the message names it.
        PlanRefused: the attention is not known, or cannot be divided so.
    """
    inputs = plan_inputs(subject, machine, lengths=lengths, observations=observations)
    plans = {phase: plan_memory(inputs, phase) for phase in phases}
    servers = {phase: server_plan(subject, phase) for phase, plan in plans.items() if plan.verdict != "refused"}
    timeline = None
    if subject.settings is not None and subject.settings.datasets:
        timeline = plan_timeline(
            subject.settings, starts=starts or datetime.now(UTC).astimezone(), rate=rate, measured=measured
        )
    return WholePlan(
        subject=subject,
        machine=machine,
        phases=plans,
        servers=servers,
        timeline=timeline,
        overlap=overlap,
        suggestion=suggest(inputs, phases) if suggestion_asked else None,
        suggestion_asked=suggestion_asked,
    )


def plan_inputs(
    subject: Subject,
    machine: Machine,
    *,
    lengths: tuple[float | None, float | None] = (None, None),
    observations: Sequence[Observation] = (),
) -> PlanInputs:
    """What the memory plan is made from: the settings' fields under their own names, and the machine."""
    serving = subject.serving
    prompt, response = _lengths(subject.settings, lengths)
    datasets = subject.settings.datasets.values() if subject.settings else ()
    inputs = PlanInputs(
        config=subject.config,
        dtype=subject.dtype,
        gpus=machine.gpus,
        gpu_memory_gib=machine.gpu_memory_gib,
        weights_bytes=subject.weights_bytes,
        host_ram_gb=serving.host_ram_gb or machine.host_ram_gb,
        prompt_tokens=prompt,
        response_tokens=response,
        concurrency=max((dataset.concurrency for dataset in datasets if dataset.kind == "generated"), default=None),
        observed=tuple(_observed(key, tokens) for key, tokens in serving.observed.items()),
        drafter=subject.drafter,
        host_loading_gb=serving.host_loading_gb,
        host_states_gb=0.0 if subject.settings is None else _generated_gb(subject.settings),
        **serving.model_dump(include=set(SAME_NAMES)),
    )
    require_plausible(inputs)
    return believing(inputs, observations)


def _observed(key: str, tokens: int) -> ObservedPool:
    fraction, _, kind = key.partition(":")
    return ObservedPool(float(fraction), kind or "bf16", tokens)


def _generated_gb(settings: PipelineSettings) -> float:
    """What a server that generates may hold of unfinished samples' states: nothing, where generation captures none."""
    generated_bytes = settings.hidden_states.generated_bytes
    return 0.0 if generated_bytes is None else generated_bytes / 1e9


def observations_of(subject: Subject, server_folder: Path) -> list[Observation]:
    """Launches of this checkpoint by the keeper of a server's folder, oldest first.

    Raises:
        BadInput: what the keeper wrote cannot be read.
    """
    if not (subject.path / "config.json").is_file():
        return []
    identity = checkpoint_identity(subject.path)
    return [one for one in read_observations(server_folder) if one.model_identity == identity]


def _lengths(
    settings: PipelineSettings | None, given: tuple[float | None, float | None]
) -> tuple[float | None, float | None]:
    """Typical lengths: given, or the longest that the configuration expects of a data set."""
    expected = [one.expected for one in settings.datasets.values() if one.expected] if settings else []
    prompts = [one.mean_prompt_tokens for one in expected if one.mean_prompt_tokens]
    responses = [one.mean_response_tokens for one in expected if one.mean_response_tokens]
    prompt, response = given
    return prompt or max(prompts, default=None), response or max(responses, default=None)


def server_plan(subject: Subject, phase: Phase) -> ServerPlan:
    """The server of a phase, for its command line; neither the model nor the drafter need be there yet.

    Raises:
        BadInput: the settings cannot work together.
    """
    benchmark = subject.settings.benchmark if subject.settings else None
    steps = benchmark.model_dump(include={"num_steps", "eagle_topk", "num_draft_tokens"}) if benchmark else {}
    drafter = DrafterPlan(path=subject.drafter_path, identity=PLANNED, **steps) if phase in WITH_DRAFTER else None
    try:
        return ServerPlan.of_serving(
            subject.serving,
            subject.profile,
            model_path=subject.path,
            model_identity=PLANNED,
            revision=subject.revision,
            trust_remote_code=subject.trust_remote_code,
            dtype=subject.dtype,
            phase=phase,
            drafter=drafter,
            forward_hooks=tuple(_hooks(subject, phase)),
        )
    except ValidationError as error:
        raise BadInput(f"{subject.name}: no {phase} server can be planned: {one_line(error)}") from error


def _hooks(subject: Subject, phase: Phase) -> list[Mapping[str, Any]]:
    """Hooks where the phase captures: the layers of the settings, else the profile's, else EAGLE-3's usual ones."""
    depth = subject.config.count("num_hidden_layers")
    asked = subject.settings.hidden_states if subject.settings else None
    generated = asked.generated_bytes if asked and phase == "generate" else None
    if phase != "capture" and generated is None:
        return []
    layers = (asked and asked.layers) or (subject.profile and subject.profile.capture_layers)
    return forward_hooks(
        states=subject.states,
        module_prefix=subject.profile.module_prefix if subject.profile else "model",
        layers=layers or sorted({layer for layer in (2, depth // 2, depth - 3) if 0 < layer < depth}),
        dtype=asked.dtype if asked else "bfloat16",
        generated_bytes=generated,
    )


def command_of(plan: ServerPlan, python: Path) -> str:
    """The command line that starts a server, with the variables that it needs, to be copied."""
    variables = [f"{name}={value}" for name, value in plan.environment().items()]
    return shlex.join(["env", *variables, *plan.command_line(python, port=plan.port or DEFAULT_PORT)])
