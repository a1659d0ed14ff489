"""The answers of ``/v1/messages``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ....protocol.decoders import json_decoder
from ..conversation.answer_turns import AnswerTurns
from ..conversation.answers import AnswerPart
from ..conversation.constraints import Receipt
from ..conversation.endings import End
from ..conversation.made_calls import MadeCall
from ..conversation.parts import Call, Text, Thinking
from ..new_ids import new_id
from .content import BusCallBlock, BusResultBlock, TextBlock, ThinkingBlock, ToolUseBlock

SIGNATURE = "tokenbus"
"""The signature of all thinking blocks. Clients send back only thinking with a signature."""

STOP_REASONS: dict[End, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "max_tool_turns": "pause_turn",
    "error": "end_turn",
}
STOPPED: tuple[End, ...] = ("stop", "tool_calls")
"""The values of ``End`` that a stop sequence may have caused."""


class ThinkingAnswer(ThinkingBlock, tag="thinking"):
    """A block of thinking, if the model's template supports thinking."""

    signature: str = ""


class BusCallAnswer(BusCallBlock, tag="mcp_tool_use"):
    """A block with a call that the gateway makes: a call of a tool of the bus, in the form of
    Anthropic's calls of MCP servers."""

    server_name: str = "tokenbus"


AnswerBlock = TextBlock | ThinkingAnswer | ToolUseBlock | BusCallAnswer | BusResultBlock
"""A block of an answer. Requests accept the same blocks, except the fields that are added here."""


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


class MessageAnswers:
    """Makes the answers about one message from its turns."""

    def __init__(self, turns: AnswerTurns) -> None:
        self._turns = turns

    def block(self, part: AnswerPart | MadeCall, empty: bool = False) -> AnswerBlock:
        """The content block for a part. ``empty``: the block has no text or input, as in the event
        that begins the block."""
        match part:
            case Text(text):
                return TextBlock(text="" if empty else text)
            case Thinking(text):
                if empty:
                    return ThinkingAnswer(thinking="")
                return ThinkingAnswer(thinking=text, signature=SIGNATURE)
            case MadeCall():
                content = [TextBlock(text=part.text)]
                failed = bool(part.error)
                return BusResultBlock(tool_use_id=part.id, content=content, is_error=failed)
            case Call():
                kind = BusCallAnswer if self._turns.is_served(part) else ToolUseBlock
                return kind(id=part.id, name=part.name, input={} if empty else _input(part))

    @property
    def ended(self) -> Ended:
        """Why the message ended."""
        turns = self._turns
        last = turns.turns[-1].sequences.get(0)
        if turns.end in STOPPED and last is not None and isinstance(last.stop, str):
            return Ended("stop_sequence", last.stop)
        limit = turns.plan.request.limit
        if turns.end == "length" and limit is not None and turns.counter.completion < limit:
            return Ended("model_context_window_exceeded", None)
        if turns.end == "error" and turns.made:
            # To continue the answer, the client may send back the calls that the gateway has made.
            return Ended("pause_turn", None)
        return Ended(None if turns.end is None else STOP_REASONS[turns.end], None)

    @property
    def usage(self) -> Usage:
        """The cost of the message so far, in tokens."""
        counter = self._turns.counter
        return Usage(counter.prompt - counter.cached, 0, counter.cached, counter.completion)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt; None before the end, or if the receipt would be empty."""
        # The blocks report the calls, so the receipt does not.
        return self._turns.receipt(calls=False) if self._turns.end is not None else None

    def started(self) -> MessageAnswer:
        """The message before its first block."""
        message = self.message()
        message.content, message.usage.output_tokens = [], 0
        return message

    def message(self) -> MessageAnswer:
        """The message so far. Each part, and each call that the gateway has made, becomes one
        block."""
        ended = self.ended
        return MessageAnswer(
            new_id("msg_"),
            "message",
            "assistant",
            self._turns.plan.prepared.name,
            [self.block(part) for part in self._turns.parts],
            ended.stop_reason,
            ended.stop_sequence,
            self.usage,
            self.receipt or UNSET,
        )


def _input(call: Call) -> dict[str, Any]:
    """The input of a tool; empty if the answer was cut inside the input."""
    with suppress(msgspec.DecodeError):
        return json_decoder(dict[str, Any]).decode(str(call.arguments))
    return {}
