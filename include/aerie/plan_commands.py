"""``aerie plan``: the memory plan, the commands and the timeline, before anything starts. Heavy imports stay inside."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from aerie.errors import BadInput

if TYPE_CHECKING:
    from aerie.artefacts.layout import EditionFiles
    from aerie.plan_subjects import Subject
    from aerie.plans import Machine, WholePlan
    from aerie.serving.plan import Phase
    from aerie.serving.prefixes import PrefixOverlap
    from aerie.serving.timeline import Range

REFUSED = 1
MOST_DIGITS = 12
LARGEST = 10.0**MOST_DIGITS
"""Above any memory, length or rate; sums of such numbers are still finite."""


def _number(option: str, what: str, *, least: float = 0.0, below: float = LARGEST) -> Callable[[str], float]:
    """A parser of numbers above ``least`` and below ``below``; its error is one line that names the option."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least < value < below:
            raise BadInput(f"{option} is {text!r}: expected {what}")
        return value

    return parse


def _count(option: str) -> Callable[[str], int]:
    """A parser of whole numbers above zero and below ``LARGEST``."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS or int(text) == 0:
            raise BadInput(f"{option} is {text!r}: expected a whole number above 0 and below {LARGEST:g}")
        return int(text)

    return parse


def _rate(text: str) -> "Range":
    """A rate, or two bounds with a hyphen between."""
    from aerie.serving.timeline import Range

    parse = _number("--rate", f"tokens per second above 0, or LOW-HIGH such as 930-1350, found {text!r}")
    low, hyphen, high = text.partition("-")
    bounds = Range(parse(low), parse(high) if hyphen else parse(low))
    if bounds.low > bounds.high:
        raise BadInput(f"--rate is {text!r}: expected LOW-HIGH, the lower first")
    return bounds


def _observation(text: str) -> tuple[str, int]:
    """``FRACTION[:KV-TYPE]=TOKENS``, as ``serving.observed`` writes it."""
    from aerie.serving.attention import KV_DTYPE_BYTES

    key, _, tokens = text.partition("=")
    fraction, _, kind = key.partition(":")
    if kind and kind not in KV_DTYPE_BYTES:
        raise BadInput(f"--observed is {text!r}: KV type {kind!r} is not known: expected {', '.join(KV_DTYPE_BYTES)}")
    parse = _number("--observed", f"FRACTION=TOKENS or FRACTION:KV-TYPE=TOKENS, found {text!r}", below=1)
    return repr(parse(fraction)) + (f":{kind}" if kind else ""), _count(f"--observed {key}")(tokens)


def _observations(given: Sequence[tuple[str, int]]) -> dict[str, int]:
    """What was observed, by fraction and KV type; the same twice is once.

    Raises:
        BadInput: two observations of the same contradict each other.
    """
    observed: dict[str, int] = {}
    for key, tokens in given:
        if observed.setdefault(key, tokens) != tokens:
            raise BadInput(f"--observed {key} is both {observed[key]:,} and {tokens:,}: expected one of them")
    return observed


def _counted(name: str, text: str) -> Any:
    return typer.Option(name, parser=_count(name), metavar="N", help=text)


def _measured(name: str, what: str, text: str, *, below: float = LARGEST) -> Any:
    return typer.Option(name, parser=_number(name, what, below=below), metavar="X", help=text)


ABOVE_ZERO = f"a number above 0 and below {LARGEST:g}"


def plan(
    model: Annotated[Path | None, typer.Option(help="Folder of the checkpoint, or its config.json.")] = None,
    profile: Annotated[str | None, typer.Option(help="Family; without --model also its bundled config.json.")] = None,
    preset: Annotated[str | None, typer.Option(help="A configuration that ships (default: AERIE_CONFIG).")] = None,
    gpus: Annotated[int | None, _counted("--gpus", "GPUs (default: those of this machine).")] = None,
    gpu_memory_gib: Annotated[
        float | None, _measured("--gpu-memory-gib", ABOVE_ZERO, "GiB that one GPU has free before the server loads.")
    ] = None,
    tp: Annotated[int | None, _counted("--tp", "Tensor-parallel ranks (default: all GPUs).")] = None,
    dp: Annotated[int | None, _counted("--dp", "Replicas, each on GPUs of its own.")] = None,
    attention_dp: Annotated[
        int | None, _counted("--attention-dp", "Data-parallel attention: groups inside the tensor-parallel ranks.")
    ] = None,
    pp: Annotated[int | None, _counted("--pp", "Pipeline stages.")] = None,
    ep: Annotated[int | None, _counted("--ep", "Expert-parallel groups inside the tensor-parallel ranks.")] = None,
    mem_fraction: Annotated[
        float | None, _measured("--mem-fraction", "a fraction between 0 and 1", "Memory fraction.", below=1)
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Type of the KV cache: auto, bf16, fp8_e4m3, ...")] = None,
    allow_quantised_kv: Annotated[
        str | None, typer.Option(help="Why a KV type that changes what the verifier writes is allowed; recorded.")
    ] = None,
    page_size: Annotated[int | None, _counted("--page-size", "Tokens in a page of the KV pool.")] = None,
    chunked_prefill_size: Annotated[int | None, _counted("--chunked-prefill-size", "Tokens of a prefill.")] = None,
    cuda_graph_max_bs: Annotated[
        int | None, _counted("--cuda-graph-max-bs", "Largest batch that decode graphs are captured for.")
    ] = None,
    max_running_requests: Annotated[
        int | None, _counted("--max-running-requests", "Most requests that run at once.")
    ] = None,
    weights_gib: Annotated[
        float | None, _measured("--weights-gib", ABOVE_ZERO, "GiB of the checkpoint (default: on disk, or estimated).")
    ] = None,
    host_ram_gb: Annotated[
        float | None, _measured("--host-ram-gb", ABOVE_ZERO, "Host memory for the server, in all, in GB.")
    ] = None,
    host_loading_gb: Annotated[
        float | None, _measured("--host-loading-gb", ABOVE_ZERO, "Host memory of it that loading takes, in GB.")
    ] = None,
    hicache_size: Annotated[int | None, _counted("--hicache-size", "Hierarchical cache in GB per rank.")] = None,
    prompt_tokens: Annotated[
        float | None, _measured("--prompt-tokens", ABOVE_ZERO, "Typical length of a prompt.")
    ] = None,
    response_tokens: Annotated[
        float | None, _measured("--response-tokens", ABOVE_ZERO, "Typical length of a response.")
    ] = None,
    rate: Annotated[
        Any, typer.Option(parser=_rate, metavar="X|LOW-HIGH", help="Response tokens a second, over all requests.")
    ] = None,
    observed: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_observation,
            metavar="FRACTION[:KV-TYPE]=TOKENS",
            help="What a server of this model reported; two give the rest without GPU memory or weights.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts to tell what a prefix cache can save (default: the edition's)."),
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Folder of the drafter (default: estimated from the verifier).")
    ] = None,
    phase: Annotated[
        Literal["generate", "capture", "benchmark", "deploy"] | None, typer.Option(help="One phase (default: all).")
    ] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Find the largest safe sizes.")] = False,
    layout: Annotated[Literal["text", "compose"], typer.Option("--format", help="Tables, or a Compose file.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON document.")] = False,
) -> None:
    """Show what a server will hold and how long a run takes; exit 0 fits or tight, 1 refused, 2 bad input."""
    from dataclasses import replace

    from aerie.artefacts.layout import EditionFiles
    from aerie.plan_subjects import with_changes, with_drafter
    from aerie.plans import make_plan, observations_of
    from aerie.serving.timeline import finished_in
    from aerie.settings.machine import data_root, server_folder

    if as_json and layout == "compose":
        raise BadInput("--json and --format compose are two documents: ask for one")
    files = EditionFiles(data_root(), "main")
    subject = _subject(model, profile, preset, files)
    serving: dict[str, Any] = {
        "data_parallel_size": dp,
        "attention_data_parallel_size": attention_dp,
        "pipeline_parallel_size": pp,
        "expert_parallel_size": ep,
        "mem_fraction_static": mem_fraction,
        "kv_cache_dtype": kv_dtype,
        "allow_quantised_kv": allow_quantised_kv,
        "page_size": page_size,
        "chunked_prefill_size": chunked_prefill_size,
        "cuda_graph_max_batch_size": cuda_graph_max_bs,
        "max_running_requests": max_running_requests,
        "host_ram_gb": host_ram_gb,
        "host_loading_gb": host_loading_gb,
        "hicache_size_gb_per_rank": hicache_size,
        "observed": _observations(observed) if observed else None,
        "tensor_parallel_size": tp,
    }
    subject = with_changes(subject, serving, gpu_memory_gib=gpu_memory_gib, weights_gib=weights_gib)
    if drafter is not None:
        subject = with_drafter(subject, drafter)
    machine = _machine(subject, gpus=gpus, gpu_memory_gib=gpu_memory_gib)
    if tp is None and subject.settings is None:
        all_gpus = subject.serving.model_copy(update={"tensor_parallel_size": _all_gpus(subject, machine)})
        subject = replace(subject, serving=all_gpus)
    whole = make_plan(
        subject,
        machine,
        phases=(phase,) if phase else _phases(subject),
        lengths=(prompt_tokens, response_tokens),
        rate=rate,
        observations=observations_of(subject, server_folder()) if machine.here else (),
        measured=finished_in(files, subject.settings) if subject.settings else None,
        overlap=_overlap(prompts, subject, files),
        suggestion_asked=suggest,
    )
    _print(whole, layout="json" if as_json else layout)
    if whole.verdict == "refused":
        raise typer.Exit(REFUSED)


def _phases(subject: "Subject") -> tuple["Phase", ...]:
    """All phases, without the capture where the settings have it done without a server of ours."""
    from aerie.plans import PHASES

    without = subject.settings is not None and not subject.settings.hidden_states.captures_in_server
    return tuple(one for one in PHASES if not (without and one == "capture"))


def _subject(model: Path | None, profile: str | None, preset: str | None, files: "EditionFiles") -> "Subject":
    """What is planned: a checkpoint or a family's bundled configuration, a preset, or the configuration in use."""
    from aerie.plan_subjects import subject_of_checkpoint, subject_of_family, subject_of_settings
    from aerie.settings.machine import settings_path
    from aerie.settings.pipeline import load_settings
    from aerie.settings.presets import preset_path

    if preset is not None and (model is not None or profile is not None):
        raise BadInput("--preset names model and profile: leave out --model and --profile")
    if model is not None:
        return subject_of_checkpoint(model, profile)
    if profile is not None:
        return subject_of_family(profile)
    path = preset_path(preset) if preset is not None else settings_path()
    return subject_of_settings(load_settings(path), edition_folder=files.folder)


def _machine(subject: "Subject", *, gpus: int | None, gpu_memory_gib: float | None) -> "Machine":
    """The GPUs that were given, or those of this machine where they are needed and nothing was given.

    Raises:
        BadInput: too little was given, and this machine has no GPU.
    """
    from dataclasses import replace

    from aerie.plans import Machine
    from aerie.serving.host import host_facts, host_facts_of
    from aerie.settings.machine import python_of

    serving = subject.serving
    if serving.device == "cpu":
        if gpus is not None or gpu_memory_gib is not None:
            raise BadInput(f"{subject.name}: device is cpu, so --gpus and --gpu-memory-gib are not for it")
        return Machine.of_facts(host_facts(), device="cpu")
    needed = serving.tensor_parallel_size * serving.pipeline_parallel_size * serving.data_parallel_size
    known = gpu_memory_gib is not None or subject.observed_enough
    if known and gpus is not None:
        return Machine(gpus, gpu_memory_gib)
    found = Machine.of_facts(host_facts_of(python_of("serve")), device="cuda")
    if not found.gpus:
        if known and (subject.settings is not None or needed > 1):
            return Machine(needed, gpu_memory_gib)
        wanted = {"--gpus": gpus is not None, "--gpu-memory-gib": known}
        missing = " and ".join(option for option, there in wanted.items() if not there)
        raise BadInput(f"{found.source}: give {missing} of the machine that is planned for")
    if gpu_memory_gib is not None:
        return Machine(gpus or found.gpus, gpu_memory_gib, found.host_ram_gb)
    return replace(found, gpus=gpus or found.gpus)


def _all_gpus(subject: "Subject", machine: "Machine") -> int:
    serving = subject.serving
    others = serving.data_parallel_size * serving.pipeline_parallel_size
    gpus = machine.gpus or 1
    if gpus % others:
        raise BadInput(f"--gpus {gpus} cannot be divided by --dp x --pp = {others}: give --tp")
    return max(1, gpus // others)


def _overlap(prompts: Path | None, subject: "Subject", files: "EditionFiles") -> "PrefixOverlap | None":
    """How the given prompts begin alike, or those of the edition where a hierarchical cache is asked for."""
    from aerie.artefacts.prompts import iterate_prompt_tokens
    from aerie.serving.prefixes import prefix_overlap

    datasets = subject.settings.datasets if subject.settings and subject.serving.hicache_size_gb_per_rank else ()
    prepared = (files.dataset(key).prompts for key in datasets)
    paths = [prompts] if prompts is not None else [path for path in prepared if path.exists()]
    if not paths:
        return None
    rows = (row for path in paths for row in iterate_prompt_tokens(path))
    return prefix_overlap(row.prompt_ids for row in rows if row.skip_reason is None)


def _print(whole: "WholePlan", *, layout: str) -> None:
    import json

    import yaml
    from rich.console import Console

    from aerie.plan_report import document_of, render
    from aerie.plans import DEFAULT_PORT
    from aerie.serving.compose import compose_document
    from aerie.settings.machine import aerie_home

    python = aerie_home() / "envs" / "serve" / "bin" / "python"
    if layout == "json":
        typer.echo(json.dumps(document_of(whole, python), indent=2, ensure_ascii=False, allow_nan=False))
        return
    if layout == "text":
        console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        for part in render(whole, python):
            console.print(part)
        return
    for phase, plan in whole.phases.items():
        if plan.verdict == "refused":
            typer.echo(f"aerie: no service for {phase}: {'; '.join(plan.reasons)}", err=True)
    if not whole.servers:
        return
    document = compose_document(
        whole.servers,
        default_port=DEFAULT_PORT,
        gpus=whole.machine.gpus or 1,
        host_ram_gb=whole.face.host_available_gb,
        states=whole.subject.states,
    )
    sys.stdout.write(yaml.safe_dump(document, sort_keys=False, width=120))
