"""What capturing hidden states while generating costs: response tokens a second with and without it.

    PYTHONPATH=include:. OMP_NUM_THREADS=1 .aerie/envs/airflow/bin/python benchmarks/capture_while_generating.py

Two real SGLang servers of one configuration (default: the demo's, on the CPU), one planned with the hooks and one
without, take turns with the same prompts and as many tokens for each. ``hooks`` is the server with the hooks, of which
nothing is asked; ``capture`` is all of it: every sample is asked for and its file waited for. The share is the median
over the turns. On a GPU a server fills it: give ``--phase`` once for each, and compare the medians.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from aerie.artefacts.response_log import Response
from aerie.generation.client import GenerateClient, GenerateRequest
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.server import Server, ensure
from aerie.generation.states import MOST_ASKED_AT_ONCE, StateKeeper, StatesFolder, open_states, request_id
from aerie.serving.client import stop
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import PipelineSettings, load_settings
from aerie.stages import Events, StageRequest

LEASE_SECONDS = 3600  # while the other server starts, or has its turn


def main() -> None:
    options = arguments()
    settings = load_settings(options.config)
    dataset = next(name for name, one in settings.datasets.items() if one.kind == "generated")
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        events = Events(Path(name) / "events.jsonl")
        requests = {
            phase: request_of(Path(name) / phase, settings, dataset, phase)
            for phase in ("separate", "generate")
            if options.phase in (None, phase)
        }
        servers: dict[str, Server] = {}
        try:
            for phase, request in requests.items():
                servers[phase] = ensure(request, events)
            for turn in range(options.turns + 1):
                for phase, request in requests.items():
                    for what in ("plain",) if phase == "separate" else ("hooks", "capture"):
                        speed = asyncio.run(run(options, request, servers[phase].url, what, turn, events))
                        servers[phase].renew()
                        print(f"turn {turn}: {what:8} {speed:8.1f} response tokens/s", flush=True)
                        if turn:  # the first warms up
                            speeds.setdefault(what, []).append(speed)
        finally:
            for request in requests.values():
                stop(request.server_folder)
    for what, measured in speeds.items():
        of_plain = ""
        if "plain" in speeds and what != "plain":
            shares = [mine / plain for mine, plain in zip(measured, speeds["plain"], strict=True)]
            of_plain = f", {statistics.median(shares):.3f} of plain ({min(shares):.3f} to {max(shares):.3f})"
        print(f"{what:8} {statistics.median(measured):8.1f} response tokens/s{of_plain}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=PROJECT_ROOT / "demo" / "config.yaml")
    parser.add_argument("--phase", choices=("separate", "generate"), help="only one of the servers")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--response-tokens", type=int, default=200)
    return parser.parse_args()


def request_of(root: Path, settings: PipelineSettings, dataset: str, capture: str) -> StageRequest:
    hidden = settings.hidden_states.model_copy(update={"capture": capture, "free_share": 0.0})
    serving = settings.serving.model_copy(update={"lease_seconds": LEASE_SECONDS})
    return StageRequest(
        settings=settings.model_copy(update={"hidden_states": hidden, "serving": serving}),
        data_root=root, server_folder=root / "server", edition="benchmark", dataset=dataset, run_id="benchmark",
    )  # fmt: skip


async def run(
    options: argparse.Namespace, request: StageRequest, url: str, what: str, turn: int, events: Events
) -> float:
    """Response tokens a second of one turn."""
    dice = random.Random(turn)  # noqa: S311 - new prompts in each turn: none is in the cache
    prompts = [
        GenerationPrompt(
            f"{what}-{turn}-{number}", "train", number,
            [dice.randrange(100, 1000) for _ in range(options.prompt_tokens)], "", options.response_tokens, None,
        )
        for number in range(options.requests)
    ]  # fmt: skip
    folder = open_states(request, prompts, events, mean_response_tokens=None) if what != "plain" else None
    async with GenerateClient.open(
        url, concurrency=options.concurrency + MOST_ASKED_AT_ONCE, sampling={"temperature": 1.0, "ignore_eos": True},
        request_timeout_seconds=3600, maximum_attempts=1, first_backoff_seconds=1.0,
    ) as client:  # fmt: skip
        states = StateKeeper(client, folder, print) if what == "capture" else None
        few = asyncio.Semaphore(options.concurrency)

        async def one(prompt: GenerationPrompt) -> int:
            own = isinstance(folder, StatesFolder)
            rid = f"benchmark:{prompt.sample_id}"
            async with few:
                answer = await client.generate(
                    GenerateRequest(
                        rid=request_id(prompt.sample_id, rid) if own else rid,
                        input_ids=prompt.prompt_ids,
                        max_new_tokens=prompt.max_new_tokens,
                        own_cache=own,
                    )
                )
            if states is not None:
                meta = answer.reply.meta_info.model_dump()
                states.keep(prompt, Response.model_construct(output_ids=answer.reply.output_ids, meta_info=meta))
            return len(answer.reply.output_ids)

        began = time.monotonic()
        tokens = sum(await asyncio.gather(*map(one, prompts)))
        if states is not None:
            await states.settle()
            if states.written != len(prompts):
                raise SystemExit(f"only {states.written} of {len(prompts)} samples were captured")
        return tokens / (time.monotonic() - began)


if __name__ == "__main__":
    main()
