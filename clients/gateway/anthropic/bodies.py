"""The bodies of the requests of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..bodies.field_types import (
    MaxThinkingTokens,
    MaxTokens,
    MaybeStops,
    Temperature,
    TopK,
    TopPOrZero,
)
from ..bodies.reading import Body
from ..conversation.constraints import Schema
from ..conversation.tool_turns import MaxToolTurns

ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class Block(Body, kw_only=True):
    """The base of all content blocks."""


class TextBlock(Block, kw_only=True, tag="text", tag_field="type"):
    """A text."""

    text: str


class ToolUseBlock(Block, kw_only=True, tag="tool_use", tag_field="type"):
    """A call of a tool, which the assistant made."""

    id: str
    name: str
    input: dict[str, Any]


class BusCallBlock(Block, kw_only=True, tag="mcp_tool_use", tag_field="type"):
    """A call that the gateway made for an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Block, kw_only=True, tag="thinking", tag_field="type"):
    """The assistant's thinking. Templates that support thinking show it to the model."""

    thinking: str


class ToolResultBlock(Block, kw_only=True, tag="tool_result", tag_field="type"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    """Whether the call failed. If so, the model sees ``Error: `` before the content."""


class BusResultBlock(Block, kw_only=True, tag="mcp_tool_result", tag_field="type"):
    """The result of a call that the gateway made. It ends the turn that has the call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


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


class Tool(Body):
    """A tool of the client, or a tool of the bus (``type`` is ``bus``), which the gateway calls.
    Tools that run on Anthropic's servers have another type and are left out."""

    name: ToolName
    input_schema: Schema | None = None
    """Required for a tool of the client."""
    description: str | None = None
    strict: bool | None = None
    """Whether the request is refused if the schema has keywords that masks cannot enforce."""
    type: Literal["custom", "bus"] | None = None


class ToolChoice(Body):
    """Which tools the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The name of the tool, if the type is ``tool``."""
    disable_parallel_tool_use: bool | None = None
    """Whether at most one call is allowed."""


class JsonFormat(Body):
    """The schema of the answer's text."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Body):
    """The form of the answer's text."""

    format: JsonFormat | None = None
    effort: str | None = None
    """The amount of thinking. It is passed to templates with the variable ``reasoning_effort``."""


class Thinking(Body):
    """Settings of thinking. A request can bound thinking, but only the model's template can enable
    thinking."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: MaxThinkingTokens | None = None
    """Maximum number of thinking tokens. After this number, the thinking is ended."""


class Messages(Body):
    """The conversation to continue: the common fields of ``CountTokens`` and ``CreateMessage``."""

    model: str
    """The name of the model. If it is empty, the default model is used."""
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    thread: Any = None
    """Refused unless it is null. Later requests of a thread contain only new messages, but this
    gateway does not store the earlier messages."""

    @property
    def bus_tools(self) -> list[str]:
        """The names of the tools of the bus that the model may call."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [tool.name for tool in self.tools or () if tool.type == "bus"]


class CountTokens(Messages):
    """The body of ``/v1/messages/count_tokens``."""


class CreateMessage(Messages, kw_only=True):
    """The body of ``/v1/messages``."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: MaybeStops | None = None
    temperature: Temperature | None = None
    """Default: 1."""
    top_p: TopPOrZero | None = None
    top_k: TopK | None = None
    max_tool_turns: MaxToolTurns | None = None
    """Maximum number of turns that the model generates if the request has tools of the bus. Only
    Tokenbus has this field."""


class TokenCount(Struct):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
