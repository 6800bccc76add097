"""The automaton's walk over one response: which region each token belongs to, and where the format was left."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aerie.boundary.grammar import (
    FRAME_KINDS,
    IN_CALL,
    IN_TOOLS,
    TOOL_ENDS,
    TOOL_KINDS,
    WHITE_SPACE_ONLY,
    Grammar,
    Kind,
    PromptEnd,
    Region,
)


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``stop`` (exclusive) of one kind.

    Kinds are ``reasoning``, ``boundary`` (a think tag, or the frame of a message with its header), ``answer``,
    ``tool`` (a tool token), ``tool_section``, ``tool_id``, ``tool_arguments``, ``after_tools``, ``end``, ``after_end``
    and ``foreign``.
    """

    kind: str
    start: int
    stop: int


@dataclass(frozen=True)
class ToolCall:
    """A complete call: the spans of its id and of its arguments, in indices of the response.

    The id's span is empty where the whole call is one body; it is the whole header where messages have channels.
    """

    id_start: int
    id_stop: int
    arguments_start: int
    arguments_stop: int


_SPAN_OF_KIND: Mapping[Kind, str] = {
    Kind.OPEN: "boundary",
    Kind.CLOSE: "boundary",
    Kind.CALL: "end",
    Kind.END: "end",
    Kind.FOREIGN: "foreign",
    Kind.OUT_OF_RANGE: "foreign",
    **dict.fromkeys(TOOL_KINDS, "tool"),
    **dict.fromkeys(FRAME_KINDS, "boundary"),
}

_SPAN_OF_REGION: Mapping[Region, str] = {
    **{region: region.value for region in Region},
    **dict.fromkeys(IN_CALL - {Region.CALL_ID}, "tool_arguments"),
    **dict.fromkeys((Region.BEFORE_OPEN, Region.HEADER, Region.BETWEEN), "boundary"),
}


@dataclass
class Walk:
    """One walk. ``marks`` maps a reason or flag to the indices of the tokens to blame."""

    codes: NDArray[np.uint8]
    ids: NDArray[np.int64]
    grammar: Grammar
    region: Region = Region.ANSWER
    opened: bool = False
    thinking_off: bool = False
    end: int | None = None
    reasoning_tokens: int = 0
    answer_tokens: int = 0
    reasoning_written: bool = False
    answer_written: bool = False
    call_written: bool = False
    calls: list[ToolCall] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: dict[str, list[int]] = field(default_factory=dict)
    _section_begun: bool = False
    _call_begun: bool = False
    _calls_in_section: int = 0
    _id_start: int = 0
    _id_stop: int = 0
    _arguments_start: int = 0

    def run(self, prompt_end: PromptEnd) -> None:
        """Walk the whole response from where the prompt leaves it."""
        self._start(prompt_end)
        position = 0
        for index in np.flatnonzero(self.codes > Kind.CONTINUED).tolist():
            if position < index:
                self._ordinary(position, index)
            position = self._special_stop(index)
            kind = Kind(int(self.codes[index]))
            self.spans.append(Span(_SPAN_OF_KIND[kind], index, position))
            self._special(index, kind)
        if position < self.codes.size:
            self._ordinary(position, self.codes.size)
        self._finish()

    def mark(self, reason: str, *indices: int) -> None:
        """Note a reason, with the tokens to blame where there are any."""
        self.marks.setdefault(reason, []).extend(indices)

    def cut_flag(self) -> str:
        """The flag of a response that the cap cut where the walk stands."""
        if self.region in (Region.REASONING, Region.BEFORE_OPEN):
            return "truncated_in_reasoning"
        return "truncated_in_tool_call" if self.region in IN_TOOLS else "truncated_in_answer"

    def _special_stop(self, index: int) -> int:
        """Index after the special token at ``index``, or after the last token of a spelled tag."""
        stop = index + 1
        if self.grammar.spelled:
            while stop < self.codes.size and self.codes[stop] == Kind.CONTINUED:
                stop += 1
        return stop

    def _start(self, prompt_end: PromptEnd) -> None:
        if prompt_end is PromptEnd.CLOSED:
            self.thinking_off = True
        elif prompt_end is PromptEnd.OPEN:
            self.opened, self.region = True, Region.REASONING
            if self.grammar.opens_in == "response":
                self.mark("no_open", *range(min(1, self.codes.size)))
        elif self.grammar.opens_in == "prompt":
            self.mark("prompt_not_open")
            self.region = Region.REASONING
        elif self.grammar.opens_in == "response":
            if prompt_end is PromptEnd.NEITHER:
                self.mark("prompt_not_open")
            self._start_before_open()
        elif self._first() == Kind.OPEN:
            self.region = Region.BEFORE_OPEN

    def _start_before_open(self) -> None:
        if self._first() in (Kind.OPEN, None):
            self.region = Region.BEFORE_OPEN
            return
        self.mark("no_open", 0)
        # A closing tag shows that reasoning is there and only its opening is lost.
        self.region = Region.REASONING if (self.codes == Kind.CLOSE).any() else Region.ANSWER

    def _first(self) -> Kind | None:
        """The first token, but for foreign ones and for white space where that may stand before the opening tag."""
        # A foreign token is a fault of its own, and hides no opening tag behind it.
        passed = {Kind.FOREIGN, Kind.OUT_OF_RANGE}
        if self.grammar.white_space_before_open:
            passed.add(Kind.WHITESPACE)
        return next((Kind(code) for code in map(int, self.codes) if code not in passed), None)

    def _ordinary(self, start: int, stop: int) -> None:
        """Ordinary and white-space tokens ``start`` to ``stop``, at least one, in the present region."""
        self.spans.append(Span(_SPAN_OF_REGION[self.region], start, stop))
        if self.region is Region.REASONING:
            self.reasoning_tokens += stop - start
            self.reasoning_written = self.reasoning_written or self._written(start, stop)
        elif self.region in (Region.ANSWER, Region.AFTER_TOOLS):
            self.answer_tokens += stop - start
            self.answer_written = self.answer_written or self._written(start, stop)
        elif self.region in WHITE_SPACE_ONLY and self._written(start, stop):
            self.mark("tool_unbalanced", start)

    def _written(self, start: int, stop: int) -> bool:
        return bool(self.codes[start] == Kind.ORDINARY or (self.codes[start:stop] == Kind.ORDINARY).any())

    def _special(self, index: int, kind: Kind) -> None:
        if kind is Kind.FOREIGN:
            self.mark("foreign_special_token", index)
        elif kind is Kind.OUT_OF_RANGE:
            self.mark("id_out_of_range", index)
        elif kind in (Kind.OPEN, Kind.CLOSE):
            self._think_tag(index, kind)
        elif self.region is Region.ENDED:
            return
        elif kind is Kind.END:
            self._end(index)
        elif self.region in (Region.REASONING, Region.BEFORE_OPEN):
            self._tool_token_in_reasoning(index, kind)
        else:
            self._tool_token(index, kind)

    def _think_tag(self, index: int, kind: Kind) -> None:
        if self.thinking_off:
            self.mark("think_tag_while_off", index)
        elif kind is Kind.OPEN:
            if self.region is Region.BEFORE_OPEN:
                self.region = Region.REASONING
            elif self.opened or (index and not self._opens_late()):
                self.mark("second_open", index)
            elif self.region is Region.ANSWER:
                self.region = Region.REASONING
            self.opened = True
        elif self.region is Region.REASONING:
            self._leave_reasoning(index)
            self.region = Region.ANSWER
        else:
            self.mark("second_close", index)

    def _opens_late(self) -> bool:
        """Whether reasoning should be open already and is not: then its first tag is not a second one."""
        return "no_open" in self.marks or "prompt_not_open" in self.marks

    def _leave_reasoning(self, index: int) -> None:
        self.opened = True
        if not self.reasoning_written:
            self.mark("empty_reasoning", index)

    def _end(self, index: int) -> None:
        if self.region is Region.REASONING:
            self.mark("no_close", index)
            self._leave_reasoning(index)
        elif self.region in IN_TOOLS:
            self.mark("tool_unbalanced", index)
        self.end, self.region = index, Region.ENDED

    def _tool_token_in_reasoning(self, index: int, kind: Kind) -> None:
        if kind is not self.grammar.tools.entry:
            self.mark("tool_unbalanced", index)
            return
        self.mark("close_missing_before_tools" if self.grammar.closed_by_tools else "no_close", index)
        self._leave_reasoning(index)
        self.region = Region.ANSWER
        self._tool_token(index, kind)

    def _tool_token(self, index: int, kind: Kind) -> None:
        tables = self.grammar.tools
        in_order = self.region in tables.may_follow[kind]
        if (kind is Kind.SECTION_BEGIN and self._section_begun) or (kind is Kind.CALL_BEGIN and self._call_begun):
            self.mark("tool_nested", index)
        elif not in_order or (kind is Kind.SECTION_END and not self._calls_in_section):
            self.mark("tool_unbalanced", index)
            if kind in TOOL_ENDS and self.region not in IN_TOOLS:
                # It ends nothing, so that the answer goes on.
                return
        if kind in (Kind.SECTION_BEGIN, Kind.SECTION_END):
            self._section_begun, self._call_begun = kind is Kind.SECTION_BEGIN, False
            self._calls_in_section = 0
        elif kind is Kind.CALL_BEGIN:
            self.call_written = self._call_begun = True
            self._calls_in_section += 1
            self._id_start = self._id_stop = self._arguments_start = index + 1
        elif kind is Kind.ARGUMENT_BEGIN:
            self.call_written = True
            self._id_stop, self._arguments_start = index, index + 1
        elif kind is Kind.KEY_BEGIN and self.region is Region.CALL_ID:
            self._id_stop = self._arguments_start = index
        elif kind is Kind.CALL_END:
            self._call_begun = False
            if in_order:
                self._complete_call(index)
        # The token decides the region even when it is out of order, so that one fault is one mark.
        self.region = tables.begins[kind]

    def _complete_call(self, index: int) -> None:
        if self.region is Region.CALL_ID:
            self._id_stop = self._arguments_start = index
        self.calls.append(ToolCall(self._id_start, self._id_stop, self._arguments_start, index))

    def _finish(self) -> None:
        if self.end is None:
            self.mark("missing_end")
            if self.region in (Region.REASONING, Region.BEFORE_OPEN):
                self.mark("no_close")
            elif self.region in IN_TOOLS:
                self.mark("tool_unbalanced")
        elif self.end + 1 < self.codes.size:
            self.mark("tokens_after_end", self.end + 1)
        if not self.answer_written and not self.call_written:
            self.mark("empty_answer")
