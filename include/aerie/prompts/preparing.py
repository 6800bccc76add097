"""From a source's rows to prompts: choose and remember every prompt, render them, then take each once in its order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aerie.artefacts.prompts import Prompt
from aerie.prompts.candidates import Candidate, Candidates
from aerie.prompts.identity import ID_DIGITS, chosen, content_hash, draw, sample_id, split_of
from aerie.prompts.tally import Progress, Tally
from aerie.settings.pipeline import SplitSettings, Turns
from aerie.sources.conversation import Conversation, Unusable, answer_positions
from aerie.sources.readers import Reader
from aerie.sources.rows import SourceRow


def collect(
    rows: Iterable[SourceRow], reader: Reader, candidates: Candidates, *, turns: Turns, seed: int, progress: Progress
) -> Tally:
    """Read every row and remember the prompts of each conversation; return what was read and refused."""
    tally = Tally()
    for row in rows:
        tally.rows += 1
        try:
            if row.problem is not None:
                raise row.problem
            conversation = reader(row.value)
            for candidate in candidates_of(conversation, row.where, turns=turns, seed=seed):
                candidates.add(candidate)
            tally.repairs.update(set(conversation.notes))
        except Unusable as problem:
            tally.skip(row.where, problem)
        except UnicodeEncodeError as error:
            tally.skip(row.where, Unusable("not_utf8", str(error)))
        except RecursionError as error:
            tally.skip(row.where, Unusable("nested_too_deeply", str(error)))
        progress.tick(lambda: (f"read {tally.rows} rows, {tally.skipped.total()} refused", {"rows": tally.rows}))
    return tally


def candidates_of(conversation: Conversation, where: str, *, turns: Turns, seed: int) -> list[Candidate]:
    """The prompts of a conversation: histories, each up to an answer that ``turns`` names.

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
    taken = {
        "one": lambda: [chosen(positions, seed=seed, conversation_id=conversation_id)],
        "first": lambda: positions[:1],
        "last": lambda: positions[-1:],
        "every": lambda: positions,
    }[turns]()
    row_hash = content_hash([messages, tools])
    return [
        Candidate(
            rank=draw("rank", seed, content),
            row_hash=row_hash,
            content_hash=content,
            source_id=conversation.source_id,
            conversation_id=conversation_id,
            where=where,
            history=messages[:position],
            tools=tools,
        )
        for position in taken
        for content in [row_hash if position == len(messages) else content_hash([messages[:position], tools])]
    ]


@dataclass
class Selection:
    """Makes prompts of rendered candidates and counts; prompts that are skipped are not ``usable``."""

    dataset: str
    splits: SplitSettings
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

    @property
    def figures(self) -> dict[str, Any]:
        """Figures so far."""
        return {"prompts": self.usable, "prompt_tokens": self.prompt_tokens, "duplicates": self.duplicates}

    def prompts(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Prompt, str]]:
        """Yield prompts and their content hashes by rank, each once.

        One that cannot be generated has a ``skip_reason`` and no ids.
        """
        for row in rows:
            if self._is_new(row["content_hash"]):
                yield self._prompt(row), row["content_hash"]
            else:
                self.duplicates += 1
            self.progress.tick(lambda: (f"took {self.usable} prompts", self.figures))

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        self.tally.rows += 1
        split = split_of(row["conversation_id"], self.splits)
        if row["problem"] is not None:
            self.tally.skip(row["where"], Unusable(row["problem"], row["detail"], by_rule=row["by_rule"]))
        else:
            self.split_counts[split] += 1
            self.prompt_tokens += len(row["prompt_ids"])
            self.longest_prompt_tokens = max(self.longest_prompt_tokens, len(row["prompt_ids"]))
        return Prompt(
            sample_id=sample_id(self.dataset, row["source_id"], row["turn"], row["content_hash"]),
            conversation_id=row["conversation_id"],
            turn=row["turn"],
            split=split,
            prompt_ids=row["prompt_ids"],
            tools=row["tools"],
            admission_rank=row["rank"],
            skip_reason=row["problem"],
        )

    def _is_new(self, content: str) -> bool:
        # 64 bits of the hash: one false duplicate in a million sources of five million prompts.
        key = int(content[:16], 16)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
