"""The messages of Anthropic's API with their content blocks, and their translation to turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..bodies.reading import Body
from ..conversation.parts import Call, Part, Result, Text, Thinking, Turn, of_kind


class TextBlock(Body, tag="text", tag_field="type"):
    """A text."""

    text: str


class ToolUseBlock(Body, tag="tool_use", tag_field="type"):
    """A call of a tool, which the assistant made."""

    id: str
    name: str
    input: dict[str, Any]


class BusCallBlock(ToolUseBlock, tag="mcp_tool_use", tag_field="type"):
    """A call that the gateway made for an earlier answer."""


class ThinkingBlock(Body, tag="thinking", tag_field="type"):
    """The assistant's thinking. Templates that support thinking show it to the model."""

    thinking: str


class ToolResultBlock(Body, tag="tool_result", tag_field="type"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    """Whether the call failed. If so, the model sees ``Error: `` before the content."""


class BusResultBlock(ToolResultBlock, tag="mcp_tool_result", tag_field="type"):
    """The result of a call that the gateway made. It ends the turn that has the call."""


class UserMessage(Body, tag="user", tag_field="role"):
    """The user's text, and the results of tools."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(Body, tag="assistant", tag_field="role"):
    """The assistant's text. In the last message, the text is the beginning of the answer."""

    content: str | list[TextBlock | ToolUseBlock | ThinkingBlock | BusCallBlock | BusResultBlock]


class SystemMessage(Body, tag="system", tag_field="role"):
    """Instructions for the assistant, which apply from this message on."""

    content: str | list[TextBlock]


Message = UserMessage | AssistantMessage | SystemMessage
Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


def to_turns(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a conversation. An assistant's message may contain results of calls that the
    gateway has made for an earlier answer. Then it is split, and the results become turns of the
    user."""
    return [turn for message in messages for turn in _turns(message)]


def _turns(message: Message) -> list[Turn]:
    parts = to_parts(message.content)
    match message:
        case UserMessage():
            return [Turn("user", parts)]
        case SystemMessage():
            return [Turn("system", parts)]
    groups = groupby(parts, lambda part: isinstance(part, Result))
    turns = [Turn("user" if made else "assistant", list(group)) for made, group in groups]
    return turns or [Turn("assistant", [])]


def to_parts(content: str | Sequence[Block] | None) -> list[Part]:
    """The parts of a content."""
    if isinstance(content, str):
        return [Text(content)] if content else []
    return [_part(block) for block in content or ()]


def _part(block: Block) -> Part:
    match block:
        case TextBlock(text=text):
            return Text(text)
        case ThinkingBlock(thinking=text):
            return Thinking(text)
        case ToolUseBlock():
            return Call(block.id, block.name, block.input)
        case ToolResultBlock():
            texts = of_kind(to_parts(block.content), Text)
            return Result(block.tool_use_id, texts, failed=bool(block.is_error))
