"""Collects the content blocks of an answer while its tokens arrive, and makes the response
objects."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ....protocol.decoders import json_decoder
from ....protocol.messages import Token
from ..conversation.answers import Answer, AnswerPart, Piece, entry_text
from ..conversation.constraints import Receipt
from ..conversation.made_calls import MadeCall
from ..conversation.parts import Call, Text, Thinking
from ..conversation.tool_turns import End, ModelTurn, ToolTurns
from ..new_ids import new_id

SIGNATURE = "tokenbus"
"""The signature of all thinking blocks. Clients send back only thinking with a signature."""

STOPPED: tuple[End, ...] = ("stop", "tool_calls")
"""The values of ``End`` that a stop sequence may have caused."""


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


class BusCallAnswer(Struct, tag="mcp_tool_use", tag_field="type"):
    """A block with a call that the gateway makes: a call of a tool of the bus, in the form of
    Anthropic's calls of MCP servers."""

    name: str
    id: str
    input: dict[str, Any]
    server_name: str = "tokenbus"


class BusResultAnswer(Struct, tag="mcp_tool_result", tag_field="type"):
    """A block with the result of a call that the gateway has made."""

    tool_use_id: str
    is_error: bool
    content: list[TextAnswer]


AnswerBlock = TextAnswer | ThinkingAnswer | CallAnswer | BusCallAnswer | BusResultAnswer


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
    """Builds a message, and counts its tokens, from the entries of its turns and the results of the
    gateway's calls."""

    def __init__(self, model: str, turns: ToolTurns, max_tokens: int) -> None:
        self._model = model
        self._turns = turns
        self._max_tokens = max_tokens
        self._before: list[AnswerPart | MadeCall] = []
        """The parts of earlier turns, and the results of their calls."""
        self._answer = Answer(None)
        self._first: Token | None = None
        """The first entry of the stream, which has the number of prompt tokens."""
        self._end: Token | None = None
        self._input = self._cached = self._output = 0

    @property
    def offset(self) -> int:
        """The index of the first block of the last turn."""
        return len(self._before)

    @property
    def parts(self) -> list[AnswerPart | MadeCall]:
        """The parts of the message so far. Each part becomes one block."""
        return [*self._before, *self._answer.parts]

    def begin_turn(self, turn: ModelTurn) -> None:
        """Begins the next turn."""
        self._answer = turn.answer = Answer(turn.prepared.form, "toolu_")

    def add(self, entries: Iterable[Token]) -> list[Piece]:
        """Adds entries; returns the changes of the turn's parts."""
        pieces: list[Piece] = []
        for entry in entries:
            self._first = self._first or entry
            self._input += entry.prompt_tokens
            self._cached += entry.cached_tokens
            self._output += (entry.token is not None) - entry.backtrack
            pieces += self._answer.feed(entry_text(self._answer.form, entry))
            if entry.finish_reason is not None:
                self._end = entry
                pieces += self._answer.end()
        return pieces

    def add_made(self, calls: Iterable[MadeCall]) -> None:
        """Adds the results of a turn's calls."""
        self._before = [*self.parts, *calls]
        self._answer = Answer(None)

    def block(self, part: AnswerPart | MadeCall, empty: bool = False) -> AnswerBlock:
        """The content block for a part. ``empty``: the block has no text or input, as in the event
        that begins the block."""
        match part:
            case Text(text):
                return TextAnswer("" if empty else text)
            case Thinking(text):
                return ThinkingAnswer("") if empty else ThinkingAnswer(text, SIGNATURE)
            case MadeCall():
                return BusResultAnswer(part.id, bool(part.error), [TextAnswer(part.text)])
            case Call():
                kind = BusCallAnswer if self._turns.is_served(part.name) else CallAnswer
                return kind(part.name, part.id, {} if empty else _input(part))

    # --- response objects -----------------------------------------------------------------------

    @property
    def ended(self) -> Ended:
        """Why the message ended."""
        end = self._end
        if end is not None and isinstance(end.stop, str) and self._turns.end in STOPPED:
            return Ended("stop_sequence", end.stop)
        match self._turns.end:
            case "":
                return Ended(None, None)
            case "length":
                full = self._output < self._max_tokens
                return Ended("model_context_window_exceeded" if full else "max_tokens", None)
            case "tool_calls":
                return Ended("tool_use", None)
            case "max_tool_turns":
                return Ended("pause_turn", None)
            case "error":
                # To continue the answer, the client may send back the calls that the gateway has
                # made.
                return Ended("pause_turn" if self._turns.made else "end_turn", None)
        return Ended("end_turn", None)

    @property
    def usage(self) -> Usage:
        """The cost of the message so far, in tokens."""
        return Usage(self._input - self._cached, 0, self._cached, self._output)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt; None before the end, or if the receipt would be empty."""
        if not self._turns.end:
            return None
        receipt = self._turns.receipt()
        # The blocks report the calls, so the receipt does not.
        receipt.tool_calls = []
        return receipt if receipt != Receipt() else None

    def started(self, first: Token) -> MessageAnswer:
        """The message before its first block; ``first`` is the first entry of its stream."""
        cached = first.cached_tokens
        return self._message([], Usage(first.prompt_tokens - cached, 0, cached, 0))

    def message(self) -> MessageAnswer:
        """The message so far."""
        return self._message([self.block(part) for part in self.parts], self.usage)

    def _message(self, content: list[AnswerBlock], usage: Usage) -> MessageAnswer:
        ended = self.ended
        return MessageAnswer(
            new_id("msg_"),
            "message",
            "assistant",
            self._model,
            content,
            ended.stop_reason,
            ended.stop_sequence,
            usage,
            self.receipt or UNSET,
        )


def _input(call: Call) -> dict[str, Any]:
    with suppress(msgspec.DecodeError):
        return json_decoder(dict[str, Any]).decode(str(call.arguments))
    return {}
