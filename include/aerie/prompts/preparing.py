"""From a source's rows to prompts, in two passes: choose and remember every prompt, then render them in their order."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aerie.artefacts.prompts import Prompt
from aerie.prompts.candidates import Candidate, Candidates
from aerie.prompts.checkpoint import Verifier
from aerie.prompts.identity import ID_DIGITS, chosen, content_hash, draw, sample_id, split_of
from aerie.prompts.rendering import Rendered, render_fitting
from aerie.prompts.tally import Progress, Tally
from aerie.settings.pipeline import SplitSettings
from aerie.sources.conversation import Conversation, Unusable, answer_positions
from aerie.sources.readers import Reader
from aerie.sources.rows import SourceRow


def collect(
    rows: Iterator[SourceRow], reader: Reader, candidates: Candidates, *, seed: int, progress: Progress
) -> Tally:
    """Read every row and remember one prompt of each conversation; return what was read and refused."""
    tally = Tally()
    for row in rows:
        tally.rows += 1
        try:
            if row.problem is not None:
                raise row.problem
            conversation = reader(row.value)
            candidates.add(candidate_of(conversation, row.where, seed=seed))
            tally.repairs.update(set(conversation.notes))
        except Unusable as problem:
            tally.skip(row.where, problem)
        except UnicodeEncodeError as error:
            tally.skip(row.where, Unusable("not_utf8", str(error)))
        except RecursionError as error:
            tally.skip(row.where, Unusable("nested_too_deeply", str(error)))
        progress.tick(lambda: (f"read {tally.rows} rows, {tally.skipped.total()} refused", {"rows": tally.rows}))
    return tally


def candidate_of(conversation: Conversation, where: str, *, seed: int) -> Candidate:
    """The one prompt of a conversation: the history before one of its answers, drawn by conversation and seed.

    A source without ids is told apart by content: conversations that begin alike are one conversation, so that the
    same request never stands on both sides of a split.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    messages, tools = conversation.messages, conversation.tools
    positions = answer_positions(messages)
    conversation_id = (
        conversation.conversation_id or conversation.source_id or content_hash(messages[: positions[0]])[:ID_DIGITS]
    )
    history = messages[: chosen(positions, seed=seed, conversation_id=conversation_id)]
    return Candidate(
        rank=draw("rank", seed, content_hash([history, tools])),
        row_hash=content_hash([messages, tools]),
        source_id=conversation.source_id,
        conversation_id=conversation_id,
        where=where,
        history=history,
        tools=tools,
    )


@dataclass
class Renderer:
    """Renders candidates and counts; prompts that are skipped are not ``usable``."""

    verifier: Verifier
    dataset: str
    seed: int
    splits: SplitSettings
    maximum_tokens: int
    progress: Progress
    tally: Tally = field(default_factory=Tally)
    split_counts: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    longest_prompt_tokens: int = 0
    duplicates: int = 0
    _seen: set[int] = field(default_factory=set)

    @property
    def usable(self) -> int:
        """Prompts so far that can be generated."""
        return self.split_counts.total()

    def prompts(self, candidates: Candidates) -> Iterator[Prompt]:
        """Yield prompts by rank, each once; one that cannot be generated has a ``skip_reason`` and no ids."""
        for candidate in candidates.in_order():
            prompt = self._prompt(candidate)
            if prompt is not None:
                yield prompt
            self.progress.tick(lambda: (f"rendered {self.usable} of {candidates.added} prompts", self.figures))

    @property
    def figures(self) -> dict[str, Any]:
        """Figures so far."""
        return {"prompts": self.usable, "prompt_tokens": self.prompt_tokens, "duplicates": self.duplicates}

    def _prompt(self, candidate: Candidate) -> Prompt | None:
        """The prompt of ``candidate``, None if an equal one was taken before it."""
        problem = None
        try:
            rendered = render_fitting(
                self.verifier,
                candidate.history,
                candidate.tools,
                maximum_tokens=self.maximum_tokens,
                seed=self.seed,
                conversation_id=candidate.conversation_id,
            )
        except Unusable as error:
            problem = error
            rendered = Rendered(candidate.history, len(answer_positions(candidate.history)) - 1, [])
        content = content_hash([rendered.history, candidate.tools])
        if not self._is_new(content):
            self.duplicates += 1
            return None
        self.tally.rows += 1
        split = split_of(candidate.conversation_id, self.splits)
        if problem is not None:
            self.tally.skip(candidate.where, problem)
        else:
            self.split_counts[split] += 1
            self.prompt_tokens += len(rendered.prompt_ids)
            self.longest_prompt_tokens = max(self.longest_prompt_tokens, len(rendered.prompt_ids))
        return Prompt(
            sample_id=sample_id(self.dataset, candidate.source_id, rendered.turn, content),
            conversation_id=candidate.conversation_id,
            turn=rendered.turn,
            split=split,
            prompt_ids=rendered.prompt_ids,
            tools=json.dumps(candidate.tools, ensure_ascii=False) if candidate.tools else None,
            admission_rank=candidate.rank,
            skip_reason=problem.reason if problem else None,
        )

    def _is_new(self, content: str) -> bool:
        # 64 bits of the hash: one false duplicate in a million sources of five million prompts.
        key = int(content[:16], 16)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
