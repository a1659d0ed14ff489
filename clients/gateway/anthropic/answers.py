"""Collects the blocks of an answer while it grows, and makes the response objects."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from ....protocol.messages import ConstraintEnd, Token
from ..answer_parts import AnswerForm, Arguments, CallBegin, Part, PartReader, Reasoning, Text
from ..new_ids import new_id


class TextAnswer(Struct, tag="text", tag_field="type"):
    """A block of text."""

    text: str


class ThinkingAnswer(Struct, tag="thinking", tag_field="type"):
    """A block of thinking, if the model's template supports thinking."""

    thinking: str
    signature: str = ""


class CallAnswer(Struct, tag="tool_use", tag_field="type"):
    """A block that calls a tool."""

    name: str
    id: str = field(default_factory=lambda: new_id("toolu_"))
    input: dict[str, Any] = {}
    """The input; empty if the answer was cut inside it."""


AnswerBlock = TextAnswer | ThinkingAnswer | CallAnswer


class Usage(Struct):
    """The cost of a message, in tokens."""

    input_tokens: int
    """Tokens of the prompt that were not in the cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Ended(Struct):
    """The reason why a message ended. Both fields are null until its end."""

    stop_reason: str | None
    stop_sequence: str | None


class Receipt(Struct):
    """The constraint of a message, and the state of its text at its end."""

    constraint: str
    """``tools`` or ``json_schema``."""
    ended: ConstraintEnd


class MessageAnswer(Struct):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    tokenbus: Receipt | UnsetType = UNSET


class Answer:
    """The blocks of a message, from the entries of its stream."""

    def __init__(self, form: AnswerForm | None, constraint: str | None, max_tokens: int) -> None:
        """``form``: the form of the answer; None if it is one text. ``constraint``: the name of the
        constraint in the receipt."""
        self._form = form
        self._reader = PartReader(form) if form is not None else None
        self._constraint = constraint
        self._max_tokens = max_tokens
        self.blocks: list[AnswerBlock] = []
        self._arguments = ""
        """The generated part of the last call's input, as JSON text."""
        self._space = ""
        """White space at the current end of the text. It is dropped if a call follows."""
        self._prompt: Token | None = None
        """The first entry of the stream, which has the number of prompt tokens."""
        self._output = 0
        self._end: Token | None = None

    def add(self, entries: Iterable[Token]) -> list[tuple[int, str]]:
        """Adds entries; returns the number and the new text of each changed block.

        A number that appears for the first time begins a block. A call begins with an empty text.
        """
        changes: list[tuple[int, str]] = []
        for entry in entries:
            self._prompt = self._prompt or entry
            self._output += (entry.token is not None) - entry.backtrack
            text = "" if entry.text is UNSET else entry.text
            self._read(self._form.text_of(entry, text) if self._form else text, changes)
            if entry.finish_reason is not None:
                self._end = entry
                self._finish(changes)
        return changes

    def _read(self, text: str, changes: list[tuple[int, str]]) -> None:
        if self._reader is None:
            self._write(text, changes)
            return
        for part in self._reader.feed(text):
            self._take(part, changes)

    def _finish(self, changes: list[tuple[int, str]]) -> None:
        for part in self._reader.end() if self._reader is not None else ():
            self._take(part, changes)
        if not self.called:
            self._write(self._space, changes)
        self._end_call()

    def _end_call(self) -> None:
        """Decodes the arguments of the last block if that is a call."""
        block = self.blocks[-1] if self.blocks else None
        if isinstance(block, CallAnswer):
            with suppress(msgspec.DecodeError):
                block.input = msgspec.json.decode(self._arguments, type=dict[str, Any])

    def _take(self, part: Part, changes: list[tuple[int, str]]) -> None:
        """Adds one part of an answer that has a form."""
        match part:
            case Text(text):
                text = self._space + text
                kept = text.rstrip()
                self._space = text[len(kept) :]
                self._write(kept, changes)
            case Reasoning(text):
                block = self.blocks[-1] if self.blocks else None
                if not isinstance(block, ThinkingAnswer):
                    block = ThinkingAnswer("")
                    self.blocks.append(block)
                block.thinking += text
                changes.append((len(self.blocks) - 1, text))
            case CallBegin(_, name):
                self._end_call()
                self._space = self._arguments = ""
                self.blocks.append(CallAnswer(name))
                changes.append((len(self.blocks) - 1, ""))
            case Arguments(_, text):
                self._arguments += text
                changes.append((len(self.blocks) - 1, text))

    def _write(self, text: str, changes: list[tuple[int, str]]) -> None:
        if not text:
            return
        block = self.blocks[-1] if self.blocks else None
        if not isinstance(block, TextAnswer):
            block = TextAnswer("")
            self.blocks.append(block)
        block.text += text
        changes.append((len(self.blocks) - 1, text))

    # --- response objects -----------------------------------------------------------------------

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._reader is not None and self._reader.called

    @property
    def ended(self) -> Ended:
        """Why the message ended."""
        end = self._end
        if end is None:
            return Ended(None, None)
        if isinstance(end.stop, str):
            return Ended("stop_sequence", end.stop)
        if end.finish_reason == "length":
            full = self._output < self._max_tokens
            return Ended("model_context_window_exceeded" if full else "max_tokens", None)
        return Ended("tool_use" if self.called else "end_turn", None)

    @property
    def usage(self) -> Usage:
        """The cost of the message."""
        assert self._prompt is not None
        return _usage(self._prompt, self._output)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt; None without a constraint."""
        if self._constraint is None or self._end is None or self._end.constraint is None:
            return None
        return Receipt(self._constraint, self._end.constraint)

    def started(self, model: str, first: Token) -> MessageAnswer:
        """The message before its first block; ``first`` is the first entry of its stream."""
        return self._message(model, [], _usage(first, 0))

    def message(self, model: str) -> MessageAnswer:
        """The message so far."""
        return self._message(model, self.blocks, self.usage)

    def _message(self, model: str, content: list[AnswerBlock], usage: Usage) -> MessageAnswer:
        ended = self.ended
        return MessageAnswer(
            new_id("msg_"),
            "message",
            "assistant",
            model,
            content,
            ended.stop_reason,
            ended.stop_sequence,
            usage,
            self.receipt or UNSET,
        )


def _usage(first: Token, output: int) -> Usage:
    """The usage of a message. The first entry of its stream has the number of prompt tokens."""
    read = first.cached_tokens
    return Usage(first.prompt_tokens - read, 0, read, output)
