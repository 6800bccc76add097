"""Prompts of benchmarks that no data may hold: found by whole turns and by runs of words.

A turn of the user is contaminated if it is equal to one of the named prompts after normalisation (NFKC, lower case,
words alone), or if it shares a run of ``NGRAM_WORDS`` words with one, as GPT-3's authors and most since have it
(Brown et al. 2020, appendix C).
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aerie.errors import BadInput
from aerie.sources.conversation import Message, Unusable
from aerie.sources.rows import iterate_file

NGRAM_WORDS = 13
COLUMNS = ("messages", "conversations", "turns", "prompt", "question", "problem", "instruction", "text")
_WORD = re.compile(r"\w+")
Words = tuple[str, ...]


def words_of(text: str) -> Words:
    """Words of a text, normalised."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).lower()))


class NamedPrompts:
    """The prompts of the files that the settings name.

    Raises:
        BadInput: a file cannot be read, or holds a row that is no prompt.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._known: set[str] = set()
        self._whole: dict[Words, str] = {}
        self._runs: dict[int, str] = {}
        for path in files:
            for where, text in prompts_of(path):
                self._add(words_of(text), where)

    def _add(self, words: Words, where: str) -> None:
        self._known.update(words)
        if words:
            self._whole.setdefault(words, where)
        for i in range(len(words) - NGRAM_WORDS + 1):
            self._runs.setdefault(hash(words[i : i + NGRAM_WORDS]), where)

    def __bool__(self) -> bool:
        """Whether any prompt is named."""
        return bool(self._known)

    def check(self, history: Sequence[Message]) -> None:
        """Check the turns of the user.

        Raises:
            Unusable: one of them is contaminated; set aside by rule.
        """
        for message in history:
            if message["role"] == "user":
                self.check_text(message["content"])

    def check_text(self, text: str) -> None:
        """Check one text; raises as ``check`` does."""
        if self._known and (where := self._found(words_of(text))):
            raise Unusable("contaminated", f"holds a prompt of {where}", by_rule=True)

    def _found(self, words: Words) -> str | None:
        if words in self._whole:
            return self._whole[words]
        known = 0
        for i, word in enumerate(words, start=1):
            # Only runs of words that the named prompts use can be one of theirs: the rest need not be hashed.
            known = known + 1 if word in self._known else 0
            if known >= NGRAM_WORDS and (where := self._runs.get(hash(words[i - NGRAM_WORDS : i]))):
                return where
        return None


def prompts_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of the prompts of a file: of each row, what the first of ``COLUMNS`` that it has asks.

    Raises:
        BadInput: the file cannot be read, or a row has none of the columns, or no text there.
    """
    for row in iterate_file(path):
        if row.problem is not None:
            raise BadInput(f"{row.where}: {row.problem}; expected a file of prompts in 'decontaminate'")
        value = next((row.value[name] for name in COLUMNS if row.value.get(name)), None)
        texts = list(_asked(value))
        if not texts:
            raise BadInput(
                f"{row.where}: expected a prompt in one of the columns {', '.join(COLUMNS)}; the row has "
                f"{', '.join(row.value)}"
            )
        yield from ((row.where, text) for text in texts)


def _asked(value: Any) -> Iterator[str]:
    """Texts that a value asks: itself, the items of a list, or the content of a turn that is the user's."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _asked(item)
    elif isinstance(value, Mapping) and value.get("role", value.get("from")) in ("user", "human"):
        yield from _asked(value.get("content", value.get("value")))
