"""The walk over messages with channels (gpt-oss): reasoning, preambles, calls and the answer are messages.

What ``aerie.boundary.walk`` calls the opening tag is here the frame of the first message, whose channel is that of
reasoning; the closing tag is that message's end. A frame's token out of its order is a ``foreign_special_token``, in a
call ``tool_unbalanced``; so is the token that follows text outside of messages. Further messages of reasoning may
follow a preamble, and nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aerie.boundary.grammar import ChannelIds, Kind, PromptEnd, Region
from aerie.boundary.walk import ToolCall, Walk


@dataclass
class _Header:
    """A message's header: indices of its ordinary tokens before and after the channel's token."""

    start: int
    first: bool = False
    channel: int | None = None
    constrained: bool = False
    role: list[int] = field(default_factory=list)
    name: list[int] = field(default_factory=list)


@dataclass
class ChannelWalk(Walk):
    """One walk over messages."""

    names: ChannelIds = field(kw_only=True)
    _header: _Header = field(default_factory=lambda: _Header(0, first=True))
    _messages: int = 0
    _answering: bool = False
    _after_reasoning: bool = False
    _stray: bool = False

    def cut_flag(self) -> str:
        """The flag of a response that the cap cut where the walk stands."""
        if self.region is Region.HEADER:
            if not self._messages:
                return "truncated_in_reasoning"
            return "truncated_in_tool_call" if self._recipient() else "truncated_in_answer"
        return super().cut_flag()

    def _start(self, prompt_end: PromptEnd) -> None:
        if prompt_end is PromptEnd.NEITHER:
            self.mark("prompt_not_open")
        self.region = Region.HEADER

    def _ordinary(self, start: int, stop: int) -> None:
        if self.region is Region.HEADER and not self._header.constrained:
            part = self._header.role if self._header.channel is None else self._header.name
            part.extend(index for index in range(start, stop) if self.codes[index] == Kind.ORDINARY)
        elif self.region is Region.BETWEEN and self._written(start, stop):
            self._stray = True
        super()._ordinary(start, stop)

    def _special(self, index: int, kind: Kind) -> None:
        if kind is Kind.FOREIGN:
            self.mark("foreign_special_token", index)
        elif kind is Kind.OUT_OF_RANGE:
            self.mark("id_out_of_range", index)
        elif self.region is not Region.ENDED:
            _STEPS[kind](self, index)

    def _on_start(self, index: int) -> None:
        if self.region is not Region.BETWEEN or self._stray:
            self._misplaced(index)
        self._begin_header(index)

    def _on_channel(self, index: int) -> None:
        if self.region is not Region.HEADER:
            self._misplaced(index)
            self._begin_header(index)
            self._header.role = []
        elif self._header.channel is not None:
            self._misplaced(index)
        self._header.channel = index

    def _on_constrain(self, index: int) -> None:
        if self.region is not Region.HEADER or self._header.channel is None or self._header.constrained:
            self._misplaced(index)
        else:
            self._header.constrained = True

    def _on_message(self, index: int) -> None:
        if self.region is not Region.HEADER:
            self._misplaced(index)
            return
        header, names = self._header, self.names
        name = self._channel_name()
        recipient = bool(self._recipient())
        known = name in (names.reasoning, names.preamble, names.answer)
        role_known = header.first or self._ids_at(header.role)[: len(names.role)] == names.role
        if header.first and (recipient or name != names.reasoning or header.channel is None):
            self.mark("no_open", 0)
        elif header.channel is None or not known or not role_known:
            self.mark("tool_unbalanced" if recipient and header.channel is None else "foreign_special_token", index)
        self._messages += 1
        self._begin_body(index, name, recipient)

    def _begin_body(self, index: int, name: tuple[int, ...], recipient: bool) -> None:
        after_reasoning, self._after_reasoning = self._after_reasoning, False
        if recipient:
            self._id_start, self._id_stop, self._arguments_start = self._header.start, index, index + 1
            self.call_written, self.region = True, Region.ARGUMENTS
        elif name == self.names.reasoning:
            if after_reasoning:
                self.mark("second_open", index)
            self.region = Region.REASONING
        else:
            self._answering, self.region = name != self.names.preamble, Region.ANSWER

    def _on_message_end(self, index: int) -> None:
        if self.region is Region.ANSWER and self._answering:
            self.end, self.region = index, Region.ENDED
            return
        if self.region is Region.REASONING:
            self._leave_reasoning(index)
            self._after_reasoning = True
        elif self.region is Region.ARGUMENTS:
            self.mark("tool_unbalanced", index)
        elif self.region is Region.BETWEEN and self._after_reasoning:
            self.mark("second_close", index)
        elif self.region is Region.HEADER and not self._messages:
            self.mark("no_open", 0)
            self._messages += 1
        elif self.region is not Region.ANSWER:
            self._misplaced(index)
        self.region = Region.BETWEEN

    def _on_call(self, index: int) -> None:
        if self.region is Region.ARGUMENTS:
            self.calls.append(ToolCall(self._id_start, self._id_stop, self._arguments_start, index))
        else:
            self.mark("tool_unbalanced", index)
        self._end_turn(index)

    def _on_end(self, index: int) -> None:
        if self.region is Region.ARGUMENTS:
            self.mark("tool_unbalanced", index)
        self._end_turn(index)

    def _end_turn(self, index: int) -> None:
        if self.region is Region.REASONING:
            self.mark("no_close", index)
            self._leave_reasoning(index)
        elif self.region in (Region.HEADER, Region.BETWEEN) and self._messages:
            self.mark("foreign_special_token", index)
        elif self.region is Region.HEADER:
            self.mark("no_open", 0)
        self.end, self.region = index, Region.ENDED

    def _finish(self) -> None:
        if self.end is None and self.region is Region.HEADER and not self._messages:
            self.mark("no_close")
        super()._finish()

    def _misplaced(self, index: int) -> None:
        """A frame's token where the format has none."""
        if self.region is Region.REASONING:
            self.mark("no_close", index)
            self._leave_reasoning(index)
        elif self.region is Region.ARGUMENTS:
            self.mark("tool_unbalanced", index)
        else:
            self.mark("foreign_special_token", index)

    def _begin_header(self, index: int) -> None:
        self.region, self._stray, self._header = Region.HEADER, False, _Header(index + 1)

    def _channel_name(self) -> tuple[int, ...]:
        """The known channel that the header names; the ids where it names none."""
        header, names = self._header, self.names
        ids = self._ids_at(header.name if header.channel is not None else self._after_role())
        return next((n for n in (names.reasoning, names.preamble, names.answer) if ids[: len(n)] == n), ids)

    def _recipient(self) -> list[int]:
        """Indices of what the header holds beside role and channel: a call's recipient."""
        after_role = self._after_role()
        known = len(self._channel_name())
        return after_role + self._header.name[known:] if self._header.channel is not None else after_role[known:]

    def _after_role(self) -> list[int]:
        role = self._header.role
        return role if self._header.first else role[len(self.names.role) :]

    def _ids_at(self, indices: list[int]) -> tuple[int, ...]:
        return tuple(self.ids[indices].tolist()) if indices else ()


_STEPS: Mapping[Kind, Callable[[ChannelWalk, int], None]] = {
    Kind.START: ChannelWalk._on_start,
    Kind.CHANNEL: ChannelWalk._on_channel,
    Kind.CONSTRAIN: ChannelWalk._on_constrain,
    Kind.MESSAGE: ChannelWalk._on_message,
    Kind.MESSAGE_END: ChannelWalk._on_message_end,
    Kind.CALL: ChannelWalk._on_call,
    Kind.END: ChannelWalk._on_end,
}
