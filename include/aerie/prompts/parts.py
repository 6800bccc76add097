"""Candidates rendered a part at a time, by several processes, into files that a later try takes up.

What a part holds depends on the candidates alone, never on which process made it or when.
"""

import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import pyarrow as pa

from aerie.artefacts.parquet import iterate_rows, write_rows
from aerie.errors import Retryable
from aerie.prompts.candidates import PART_CANDIDATES, Candidate, read_part
from aerie.prompts.checkpoint import load_verifier
from aerie.prompts.decontamination import NamedPrompts
from aerie.prompts.identity import content_hash
from aerie.prompts.rendering import Fit, Rendered, Renderer
from aerie.settings.pipeline import VerifierSettings
from aerie.sources.conversation import Unusable, answer_positions

SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int64(), nullable=False),
        pa.field("source_id", pa.string()),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("where", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("tools", pa.string()),
        pa.field("problem", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("by_rule", pa.bool_(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Work:
    """What every process needs to render parts: where the candidates are, where parts go, and how they are made."""

    candidates: Path
    folder: Path
    verifier: VerifierSettings
    decontaminate: tuple[Path, ...]
    fit: Fit

    def part(self, number: int) -> Path:
        """File of a part."""
        return self.folder / f"part-{number:06d}.parquet"


class PartRenderer:
    """Renders parts of some work."""

    def __init__(self, work: Work, renderer: Renderer, named: NamedPrompts) -> None:
        self._work = work
        self._renderer = renderer
        self._named = named

    def write(self, number: int) -> None:
        """Render a part and write it, whole or not at all."""
        rows = map(self._row, read_part(self._work.candidates, number))
        write_rows(self._work.part(number), SCHEMA, rows)

    def _row(self, candidate: Candidate) -> Mapping[str, Any]:
        problem = None
        try:
            self._named.check(candidate.history)
            rendered = self._work.fit.render(
                self._renderer, candidate.history, candidate.tools, conversation_id=candidate.conversation_id
            )
        except Unusable as error:
            problem = error
            rendered = Rendered(candidate.history, len(answer_positions(candidate.history)) - 1, [])
        return {
            "rank": candidate.rank,
            "source_id": candidate.source_id,
            "conversation_id": candidate.conversation_id,
            "where": candidate.where,
            "turn": rendered.turn,
            "content_hash": candidate.content_hash
            if len(rendered.history) == len(candidate.history)
            else content_hash([rendered.history, candidate.tools]),
            "prompt_ids": rendered.prompt_ids,
            "tools": json.dumps(candidate.tools, ensure_ascii=False) if candidate.tools else None,
            "problem": problem.reason if problem else None,
            "detail": problem.detail if problem else None,
            "by_rule": bool(problem and problem.by_rule),
        }


def write_parts(work: Work, here: PartRenderer, count: int, *, workers: int) -> Iterator[int]:
    """Write the parts of ``count`` candidates that are not there yet; yield after each how many are.

    One worker is ``here``; more are processes, each of which loads the tokenizer for itself.

    Raises:
        Retryable: a worker was killed.
    """
    parts = range(-(-count // PART_CANDIDATES))
    missing = [number for number in parts if not work.part(number).is_file()]
    done = len(parts) - len(missing)
    for _ in _written(work, here, missing, min(workers, len(missing))):
        done += 1
        yield done


def _written(work: Work, here: PartRenderer, missing: list[int], workers: int) -> Iterator[None]:
    if workers <= 1:
        yield from map(here.write, missing)
        return
    # Spawned, not forked: tokenizers run threads, which a fork would leave behind in an unknown state.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start, initargs=(work,))
    try:
        running: set[Future[None]] = {pool.submit(_write, number) for number in missing}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()
    except BrokenProcessPool as error:
        raise Retryable(f"a process that rendered prompts was killed (memory?): {error}") from error
    finally:
        pool.shutdown(cancel_futures=True)


_renderers: list[PartRenderer] = []
"""In a worker: its renderer."""


def _start(work: Work) -> None:
    # The workers are the parallelism; and none may outlive the task, whose pipes it would wait on for ever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    renderer = Renderer(load_verifier(work.verifier), work.verifier.prompt_date)
    _renderers.append(PartRenderer(work, renderer, NamedPrompts(work.decontaminate)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _write(number: int) -> None:
    _renderers[0].write(number)


def iterate_parts(work: Work, count: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts, in the order of the candidates."""
    for number in range(-(-count // PART_CANDIDATES)):
        yield from iterate_rows(work.part(number), SCHEMA, written_by="prepare")
