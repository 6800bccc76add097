"""A decoded sample as sections and pieces of text; what a person could not see, or would see wrongly, is spelt out."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from aerie_dashboard.documents import Stored

FOLD_BEYOND, SHOWN_BEFORE_FOLD = 4_000, 1_500

TITLES = {
    "prompt": "Prompt",
    "reasoning": "Reasoning",
    "boundary": "Boundary",
    "answer": "Answer",
    "tools": "Tool calls",
    "after_tools": "After the tool calls",
    "end": "End",
    "after_end": "After the end",
    "foreign": "Foreign tokens",
}
TOOL_KINDS = frozenset({"tool", "tool_section", "tool_id", "tool_arguments"})

# Decoding leaves no trace of which text was one token: special tokens are known by how they are written.
_SPECIAL = r"<\|[^|<>\s]{1,64}\|>|</?think>|<[｜][^<>｜]{1,64}[｜]>|\[(?:BOS|EOS|PAD|UNK)\]"
_PIECES = re.compile(rf"(?P<special>{_SPECIAL})|(?P<other>.)", re.DOTALL)

PieceKind = Literal["text", "special", "hidden", "id", "arguments"]


class PreviewDocument(Stored):
    """What a page shows of a preview (``aerie.artefacts.previews``)."""

    verdict: str
    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    positions: dict[str, tuple[int, ...]]
    conversation_id: str
    split: str
    prompt_tokens: int
    response_tokens: int
    reasoning_tokens: int
    spans: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Piece:
    """A run of text of one kind; ``hidden`` is written as code points."""

    kind: PieceKind
    text: str


@dataclass(frozen=True)
class Section:
    """Spans of a sample that belong together: ``shown``, and what is ``folded`` away where they are long."""

    kind: str
    characters: int
    shown: tuple[Piece, ...]
    folded: tuple[Piece, ...]

    @property
    def title(self) -> str:
        """Its name for people."""
        return TITLES.get(self.kind, self.kind.replace("_", " "))


def sections_of(document: PreviewDocument) -> list[Section]:
    """The sample from its prompt to its end."""
    return [
        _section(kind, list(spans))
        for kind, spans in groupby(document.spans, key=lambda span: "tools" if span[0] in TOOL_KINDS else span[0])
    ]


def _section(kind: str, spans: Sequence[tuple[str, str]]) -> Section:
    characters = sum(len(text) for _, text in spans)
    room = characters if characters <= FOLD_BEYOND else SHOWN_BEFORE_FOLD
    shown: list[Piece] = []
    folded: list[Piece] = []
    for span_kind, text in spans:
        shown += pieces_of(text[:room], span_kind)
        folded += pieces_of(text[room:], span_kind)
        room = max(0, room - len(text))
    return Section(kind, characters, tuple(shown), tuple(folded))


def pieces_of(text: str, kind: str) -> Iterator[Piece]:
    """Text cut into pieces; ``kind`` is that of its span."""
    plain: PieceKind = {"tool_id": "id", "tool_arguments": "arguments"}.get(kind, "text")  # type: ignore[assignment]
    if kind in ("boundary", "tool", "end", "foreign") and text.isprintable() and text:
        yield Piece("special", text)
        return
    matches = ((_kind(match, plain), match.group()) for match in _PIECES.finditer(text))
    for (piece_kind, single), group in groupby(matches, key=lambda one: (one[0], one[1] if one[0] != plain else "")):
        texts = [found for _, found in group]
        if piece_kind == "hidden":
            times = f" ×{len(texts):,}" if len(texts) > 1 else ""  # noqa: RUF001
            yield Piece("hidden", f"U+{ord(single):04X}{times}")
        else:
            yield Piece(piece_kind, "".join(texts))


def _kind(match: re.Match[str], plain: PieceKind) -> PieceKind:
    if match.lastgroup == "special":
        return "special"
    character = match.group()
    return plain if character.isprintable() or character in "\n\t" else "hidden"
