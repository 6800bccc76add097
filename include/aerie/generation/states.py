"""Hidden states of the samples that are kept, taken while they are generated (``hidden_states.capture: generate``).

The server keeps the rows of what it generates in memory. When a sample is durable and kept, it is asked for by a
second request of prompt and response: the server has all but the last token in a cache of the sample's own, computes
that one, which generation never feeds forward, and its hook writes the state file. Nothing here can spoil a sample:
what is not written is left to the stage ``capture``, and what is wrong is found there by its tokens.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aerie.artefacts.response_log import Response
from aerie.artefacts.state_names import present_bytes, state_name, state_path
from aerie.generation.client import GenerateClient, RequestFailed, ServerGone
from aerie.generation.prompts import GenerationPrompt
from aerie.hidden_states.forecast import Forecast, forecast_disk, require_fit
from aerie.hidden_states.identity import bind_states, capture_identity
from aerie.hidden_states.layers import CapturedLayers, planned_layers
from aerie.hidden_states.protocol import (
    GeneratedRequest,
    failure_path,
    generated_key,
    hook_failure_path,
    why_not_written,
)
from aerie.settings.pipeline import DatasetSettings
from aerie.stages import Events, StageRequest

MOST_ASKED_AT_ONCE = 32
FILE_SECONDS = 120.0
SETTLE_SECONDS = 300.0
NOT_CAPTURED = "states_not_captured"


@dataclass(frozen=True)
class StatesFolder:
    """Where states are written, and what may be: samples of up to ``maximum_tokens``, while a disk has room."""

    path: Path
    layers: CapturedLayers
    maximum_tokens: int
    free_share: float

    def refusal(self, tokens: int) -> str | None:
        """Why the states of so many tokens are not written."""
        if tokens > self.maximum_tokens:
            return f"it has {tokens:,} tokens, and corpus.maximum_length is {self.maximum_tokens:,}"
        disk = shutil.disk_usage(self.path)
        if disk.free - tokens * self.layers.bytes_per_token < disk.total * self.free_share:
            return f"the disk of {self.path} has {disk.free / 1e9:,.2f} GB free: hidden_states.free_share is spared"
        return None


def open_states(
    request: StageRequest, prompts: Sequence[GenerationPrompt], events: Events, *, mean_response_tokens: float | None
) -> StatesFolder | None:
    """The folder that a data set's states are written into, after a forecast of its disk; None where none are.

    ``mean_response_tokens`` is measured on what was kept before; None: nothing was.

    Raises:
        BadInput: the layers cannot be captured.
        Failed: the states do not fit (the message has the sum), or the folder has states of other layers.
    """
    settings = request.settings
    if settings.hidden_states.capture == "separate":
        return None
    layers, files = planned_layers(settings), request.files
    written = replace(layers, storage="plain")  # the stage capture makes them smaller
    predicted = forecast_generated(request, prompts, written, mean_response_tokens=mean_response_tokens)
    events.progress(f"hidden states while generating, at most: {predicted.sum}", bytes=predicted.total_bytes)
    require_fit(predicted)
    bind_states(files, capture_identity(request, layers), discard=False)
    hook_failure_path(files.states).unlink(missing_ok=True)  # of an earlier server
    return StatesFolder(
        path=files.states,
        layers=written,
        maximum_tokens=settings.corpus.maximum_length,
        free_share=settings.hidden_states.free_share,
    )


def forecast_generated(
    request: StageRequest,
    prompts: Sequence[GenerationPrompt],
    layers: CapturedLayers,
    *,
    mean_response_tokens: float | None,
) -> Forecast:
    """Disk that the states of a data set's kept samples may take, those of earlier runs among them."""
    settings = request.settings
    return forecast_disk(
        tokens=most_kept_tokens(
            request.dataset_settings,
            prompts,
            maximum_tokens=settings.corpus.maximum_length,
            mean_response_tokens=mean_response_tokens,
        ),
        layers=layers,
        folder=request.files.states,
        present_bytes=present_bytes(request.files.states, (prompt.sample_id for prompt in prompts)),
        free_share=settings.hidden_states.free_share,
    )


def most_kept_tokens(
    dataset: DatasetSettings,
    prompts: Sequence[GenerationPrompt],
    *,
    maximum_tokens: int,
    mean_response_tokens: float | None,
) -> int:
    """Tokens, prompts included, that a data set keeps at most: all its prompts to their caps, within its limits.

    A budget of response tokens brings as many prompts as its mean response length says: measured, else expected.
    """
    usable = [prompt for prompt in prompts if prompt.skip_reason is None]
    whole = sum(min(len(prompt.prompt_ids) + prompt.max_new_tokens, maximum_tokens) for prompt in usable)
    bounds = [whole]
    if dataset.max_total_tokens is not None:
        bounds.append(dataset.max_total_tokens)
    expected = dataset.expected.mean_response_tokens if dataset.expected else None
    mean = mean_response_tokens or expected
    if dataset.budget_tokens and mean and usable:
        mean_prompt = sum(len(prompt.prompt_ids) for prompt in usable) / len(usable)
        bounds.append(int(dataset.budget_tokens * (1 + mean_prompt / mean)))
    return min(bounds)


class StateKeeper:
    """Asks the server for the states of samples that are kept, beside generation. ``alert`` is told of the first fault.

    ``written`` counts the state files, ``left`` the kept samples whose states are left to the stage ``capture``.
    """

    def __init__(self, client: GenerateClient, folder: StatesFolder, alert: Callable[[str, str], None]) -> None:
        self._client = client
        self._folder = folder
        self._alert = alert
        self._few = asyncio.Semaphore(MOST_ASKED_AT_ONCE)
        self._error: BaseException | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.written = 0
        self.left = 0

    def keep(self, prompt: GenerationPrompt, response: Response) -> None:
        """Ask for the states of a sample whose response is durable and kept; returns at once."""
        task = asyncio.create_task(self._keep(prompt, response))
        self.tasks.add(task)
        task.add_done_callback(self._done)

    async def settle(self) -> None:
        """Wait for what was asked for, as long as it may take a server that has nothing else to do.

        Raises:
            Exception: asking failed in a way that nobody foresaw.
        """
        if self.tasks:
            _, late = await asyncio.wait(self.tasks, timeout=SETTLE_SECONDS)
            if late:
                self._leave(
                    f"{len(late)} samples were asked for and not written {SETTLE_SECONDS:.0f} s later", len(late)
                )
        if self._error is not None:
            raise self._error

    def _done(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error

    async def _keep(self, prompt: GenerationPrompt, response: Response) -> None:
        ids = [*prompt.prompt_ids, *response.output_ids]
        request = GeneratedRequest(
            key=str(response.meta_info["id"]), name=state_name(prompt.sample_id), tokens=len(ids)
        )
        async with self._few:
            try:
                reason = self._folder.refusal(len(ids)) or await self._ask(request, ids)
            except OSError as error:
                reason = str(error)
        if reason is None:
            self.written += 1
        else:
            self._leave(f"sample {prompt.sample_id}: {reason}", 1)

    def _leave(self, reason: str, samples: int) -> None:
        if not self.left:
            self._alert(
                NOT_CAPTURED,
                "states were not captured while generating, and are left to the stage capture, as others of this run "
                f"may be: {reason}",
            )
        self.left += samples

    async def _ask(self, request: GeneratedRequest, ids: Sequence[int]) -> str | None:
        """Have the state file written; why it was not."""
        states = self._folder.path
        path, failure = state_path(states, request.name), failure_path(states, request.name)
        for earlier in (path, failure):  # of another response
            earlier.unlink(missing_ok=True)
        try:
            await self._client.finish(request.request_id, ids, own_cache=request.key)
        except (RequestFailed, ServerGone) as error:
            return str(error)
        return await why_not_written(states, request.name, seconds=FILE_SECONDS)


def request_id(sample_id: str, unique: str) -> str:
    """Id under which the server keeps the rows of a sample that it generates."""
    return generated_key(state_name(sample_id), unique)
