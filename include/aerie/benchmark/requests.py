"""Held-out prompts sent to a server, and what came back."""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.prompt_lines import iterate_prompt_lines
from aerie.artefacts.prompts import Prompt, iterate_prompts
from aerie.artefacts.verifier_tokens import read_verifier_tokens
from aerie.benchmark.measures import DatasetRun, Measured, verification_of
from aerie.errors import AerieError, BadInput, Failed
from aerie.generation.client import GenerateClient, GenerateRequest, RequestFailed
from aerie.serving.sampling import sampling_parameters
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import Sampling
from aerie.stages import Events

Result = TypeVar("Result")

GREEDY = Sampling(temperature=0.0, top_p=1.0)
WARM_UP_TOKENS = 8
FIRST_BACKOFF_SECONDS = 1.0


@dataclass(frozen=True)
class Held:
    """Held-out prompts of one data set, the file that they are from, and the tokens at which the verifier stops."""

    dataset: str
    prompts: Sequence[Prompt]
    stop_token_ids: Sequence[int]
    path: Path

    def first(self, number: int) -> "Held":
        """The same with at most so many prompts."""
        return replace(self, prompts=self.prompts[:number])


def held_out_prompts(settings: PipelineSettings, files: EditionFiles) -> list[Held]:
    """Prompts of the benchmark split, up to ``prompts_per_dataset`` of each generated data set, in admission order.

    Prompts that would not fit the server's context with their answer are left out.

    Raises:
        BadInput: there is none at all, or data sets were prepared with different verifiers.
    """
    asked = settings.benchmark
    longest = settings.serving.context_length - asked.max_new_tokens
    held = []
    for key, dataset in settings.datasets.items():
        path = files.dataset(key).prompts
        if dataset.kind != "generated" or not path.is_file():
            continue
        usable = (
            prompt
            for prompt in iterate_prompts(path)
            if prompt.split == "benchmark" and prompt.skip_reason is None and len(prompt.prompt_ids) < longest
        )
        prompts = list(islice(usable, asked.prompts_per_dataset))
        if prompts:
            eos_ids = read_verifier_tokens(files.dataset(key).verifier_tokens).eos_ids
            held.append(Held(dataset=key, prompts=prompts, stop_token_ids=eos_ids, path=path))
    if not held:
        raise BadInput(
            f"edition {files.edition}: no held-out prompt shorter than {longest} tokens; raise splits.benchmark and "
            "run prepare again"
        )
    if len({tuple(one.stop_token_ids) for one in held}) > 1:
        raise BadInput(f"edition {files.edition}: data sets were prepared with different verifiers; prepare them again")
    return held


def prompts_of_file(path: Path, settings: PipelineSettings, *, stop_token_ids: Sequence[int]) -> Held:
    """Prompts of someone's own file, as many as of a data set, which is named after the file.

    Raises:
        BadInput: the file cannot be read, has no prompt, has a data set's name, or a prompt is longer than the server
            takes.
    """
    asked = settings.benchmark
    if path.stem in settings.datasets:
        raise BadInput(f"{path}: {path.stem} is a data set of the configuration: give the file another name")
    prompts = list(islice(iterate_prompt_lines(path), asked.prompts_per_dataset))
    longest = settings.serving.context_length - asked.max_new_tokens
    for prompt in prompts:
        if len(prompt.prompt_ids) >= longest:
            raise BadInput(
                f"{path}: prompt {prompt.sample_id} has {len(prompt.prompt_ids)} tokens: expected less than {longest}, "
                "serving.context_length less benchmark.max_new_tokens"
            )
    if not prompts:
        raise BadInput(f"{path}: no prompt in it")
    return Held(dataset=path.stem, prompts=prompts, stop_token_ids=stop_token_ids, path=path)


@dataclass(frozen=True)
class Load:
    """How requests are sent; data sets ``apart``, one after the other, have each their own tokens/s."""

    concurrency: int
    sampling: Sampling
    max_new_tokens: int
    request_timeout_seconds: float
    maximum_attempts: int
    with_drafter: bool
    apart: bool


def measure(url: str, held: Sequence[Held], load: Load, events: Events, *, label: str) -> dict[str, DatasetRun]:
    """Send every prompt to the server at ``url`` and return the runs by data set.

    One short request goes before them, unmeasured.

    Raises:
        Failed: a request failed for good, or a reply lacks what is measured.
        Retryable: the server went away.
    """
    return asyncio.run(_measure(url, held, load, events, label=label))


async def _measure(url: str, held: Sequence[Held], load: Load, events: Events, *, label: str) -> dict[str, DatasetRun]:
    async with GenerateClient.open(
        url,
        concurrency=load.concurrency,
        sampling=sampling_parameters(load.sampling, stop_token_ids=held[0].stop_token_ids),
        request_timeout_seconds=load.request_timeout_seconds,
        maximum_attempts=load.maximum_attempts,
        first_backoff_seconds=FIRST_BACKOFF_SECONDS,
    ) as client:
        await _send(client, held[0].dataset, held[0].prompts[0], load, max_new_tokens=WARM_UP_TOKENS)
        slots = asyncio.Semaphore(load.concurrency)
        runs: dict[str, DatasetRun] = {}

        async def run(one: Held) -> None:
            runs[one.dataset] = await _run(client, one, load, slots)
            events.progress(
                f"{label}: {one.dataset}: {len(one.prompts)} prompts, {runs[one.dataset].tokens} tokens",
                datasets=len(runs),
                of_datasets=len(held),
            )

        if load.apart:
            for one in held:
                await run(one)
        else:
            await _all(run(one) for one in held)
    return {one.dataset: runs[one.dataset] for one in held}


async def _run(client: GenerateClient, held: Held, load: Load, slots: asyncio.Semaphore) -> DatasetRun:
    async def one(prompt: Prompt) -> Measured:
        async with slots:
            return await _send(client, held.dataset, prompt, load, max_new_tokens=load.max_new_tokens)

    started = time.monotonic()
    requests = await _all(one(prompt) for prompt in held.prompts)
    return DatasetRun(seconds=time.monotonic() - started, requests=tuple(requests))


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results of work done at once; the first error ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except* AerieError as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


def _first(failures: "ExceptionGroup[Exception]") -> Exception:
    failure = failures.exceptions[0]
    return _first(failure) if isinstance(failure, ExceptionGroup) else failure


async def _send(client: GenerateClient, dataset: str, prompt: Prompt, load: Load, *, max_new_tokens: int) -> Measured:
    request = GenerateRequest(
        rid=f"benchmark:{dataset}:{prompt.sample_id}", input_ids=prompt.prompt_ids, max_new_tokens=max_new_tokens
    )
    try:
        answer = await client.generate(request)
    except RequestFailed as error:
        raise Failed(f"{dataset}: sample {prompt.sample_id}: {error.kind}: {error}") from error
    meta: Mapping[str, Any] = answer.reply.meta_info.model_dump()
    output_ids, tokens = answer.reply.output_ids, answer.reply.meta_info.completion_tokens
    if len(output_ids) != tokens:
        raise Failed(
            f"{dataset}: sample {prompt.sample_id}: {len(output_ids)} output_ids, but completion_tokens {tokens}"
        )
    verification = None
    if load.with_drafter:
        verification = verification_of(meta, completion_tokens=tokens, sample_id=prompt.sample_id)
    return Measured(
        dataset=dataset,
        sample_id=prompt.sample_id,
        prompt_tokens=len(prompt.prompt_ids),
        output_ids=tuple(output_ids),
        completion_tokens=tokens,
        finish_reason=answer.reply.meta_info.finish_reason.type,
        verification=verification,
    )
