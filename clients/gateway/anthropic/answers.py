"""Collects the content blocks of an answer while its tokens arrive, and makes the response
objects."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ....protocol.messages import Token
from ..conversation.answers import Answer, AnswerPart, Piece, entry_text
from ..conversation.constraints import Receipt
from ..conversation.parts import Call, Text, Thinking
from ..conversation.planning import Prepared
from ..new_ids import new_id

SIGNATURE = "tokenbus"
"""The signature of all thinking blocks. Clients send back only thinking with a signature."""


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
    id: str
    input: dict[str, Any]
    """The input of the tool; empty if the answer was cut inside the input."""


AnswerBlock = TextAnswer | ThinkingAnswer | CallAnswer


class Usage(Struct):
    """The cost of a message, in tokens."""

    input_tokens: int
    """Tokens of the prompt that were not in the cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Ended(Struct):
    """The reason why a message ended. Both fields are null until the message ends."""

    stop_reason: str | None
    stop_sequence: str | None


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


class GrowingMessage:
    """Builds a message, and counts its tokens, from the entries of its stream."""

    def __init__(self, prepared: Prepared, max_tokens: int) -> None:
        self.answer = Answer(prepared.form, "toolu_")
        self.checks = prepared.checks
        self._prepared = prepared
        self._max_tokens = max_tokens
        self._prompt: Token | None = None
        """The first entry of the stream, which has the number of prompt tokens."""
        self._output = 0
        self._end: Token | None = None

    def add(self, entries: Iterable[Token]) -> list[Piece]:
        """Adds entries; returns the changes of the answer's parts."""
        pieces: list[Piece] = []
        for entry in entries:
            self._prompt = self._prompt or entry
            self._output += (entry.token is not None) - entry.backtrack
            pieces += self.answer.feed(entry_text(self.answer.form, entry))
            if entry.finish_reason is not None:
                self._end = entry
                pieces += self.answer.end()
        return pieces

    # --- response objects -----------------------------------------------------------------------

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
        return Ended("tool_use" if self.answer.called else "end_turn", None)

    @property
    def usage(self) -> Usage:
        """The cost of the message so far, in tokens."""
        assert self._prompt is not None
        return _usage(self._prompt, self._output)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt; None before the end, or if the receipt would be empty."""
        constraint = self._prepared.constraint
        if self._end is None:
            return None
        receipt = Receipt(exact=self._end.exact)
        if constraint is not None and self._end.constraint is not None:
            receipt.constraint, receipt.ended = constraint.label, self._end.constraint
            receipt.keywords = self.checks.outcomes.get(0, {})
        return receipt if receipt != Receipt() else None

    def started(self, first: Token) -> MessageAnswer:
        """The message before its first block; ``first`` is the first entry of its stream."""
        return self._message([], _usage(first, 0))

    def message(self) -> MessageAnswer:
        """The message so far."""
        return self._message([block_of(part) for part in self.answer.parts], self.usage)

    def _message(self, content: list[AnswerBlock], usage: Usage) -> MessageAnswer:
        ended = self.ended
        return MessageAnswer(
            new_id("msg_"),
            "message",
            "assistant",
            self._prepared.model.name,
            content,
            ended.stop_reason,
            ended.stop_sequence,
            usage,
            self.receipt or UNSET,
        )


def block_of(part: AnswerPart, empty: bool = False) -> AnswerBlock:
    """The content block for a part of an answer. ``empty``: the block has no text or input, as in
    the event that begins the block."""
    match part:
        case Text(text):
            return TextAnswer("" if empty else text)
        case Thinking(text):
            return ThinkingAnswer("") if empty else ThinkingAnswer(text, SIGNATURE)
        case Call():
            return CallAnswer(part.name, part.id, {} if empty else _input(part))


def _input(call: Call) -> dict[str, Any]:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(str(call.arguments), type=dict[str, Any])
    return {}


def _usage(first: Token, output: int) -> Usage:
    """The usage of a message with ``output`` generated tokens. ``first``: the first entry of the
    stream, which has the number of prompt tokens."""
    read = first.cached_tokens
    return Usage(first.prompt_tokens - read, 0, read, output)
