"""The bodies of the requests of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ..bodies import Body
from ..field_types import MaxTokens, Stops, Temperature, TopK, TopP

Ignored = Any | UnsetType
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
Schema = dict[str, Any]


class Block(Body, kw_only=True):
    """The base of all blocks of a content."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    cache_control: Ignored = UNSET
    """This field has no effect, because prefixes of prompts are always cached."""
    citations: Ignored = UNSET


class TextBlock(Block, kw_only=True, tag="text", tag_field="type"):
    """A text."""

    text: str


class ToolUseBlock(Block, kw_only=True, tag="tool_use", tag_field="type"):
    """A call of a tool, which the assistant made."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"caller", "toolset_name"}

    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored = UNSET
    toolset_name: Ignored = UNSET


class ThinkingBlock(Block, kw_only=True, tag="thinking", tag_field="type"):
    """The assistant's thinking. Templates that support thinking show it to the model."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"signature"}

    thinking: str
    signature: Ignored = UNSET


class ToolResultBlock(Block, kw_only=True, tag="tool_result", tag_field="type"):
    """The result of a call."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"toolset_name"}

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    """Whether the call failed. If so, the model sees ``Error: `` before the content."""
    toolset_name: Ignored = UNSET


class UserMessage(Body, tag="user", tag_field="role"):
    """The user's text, and the results of tools."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(Body, tag="assistant", tag_field="role"):
    """The assistant's text. In the last message, the text is the beginning of the answer."""

    content: str | list[TextBlock | ToolUseBlock | ThinkingBlock]


class SystemMessage(Body, tag="system", tag_field="role"):
    """Instructions for the assistant from here on."""

    content: str | list[TextBlock]


Message = UserMessage | AssistantMessage | SystemMessage


class Tool(Body):
    """A tool of the client. Tools that run on Anthropic's servers are refused, because they have
    another type."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming"}
        | {"input_examples", "strict"}
    )

    name: ToolName
    input_schema: Schema
    description: str | None = None
    type: Literal["custom"] | None = None
    allowed_callers: Ignored = UNSET
    cache_control: Ignored = UNSET
    defer_loading: Ignored = UNSET
    eager_input_streaming: Ignored = UNSET
    input_examples: Ignored = UNSET
    strict: Ignored = UNSET
    """This field has no effect, because the schema is always enforced."""


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

    IGNORED: ClassVar[frozenset[str]] = frozenset({"effort"})

    format: JsonFormat | None = None
    effort: Ignored = UNSET


class Thinking(Body):
    """Settings of thinking. A request can bound thinking, but only the model's template can enable
    it."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of thinking tokens, after which thinking is closed."""
    display: Ignored = UNSET


class Messages(Body):
    """The conversation to continue: the common fields of ``CountTokens`` and ``CreateMessage``."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "speed", "user_profile_id", "workspace_id"}
    )

    model: str
    """The model; empty: the default model."""
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    cache_control: Ignored = UNSET
    speed: Ignored = UNSET
    user_profile_id: Ignored = UNSET
    workspace_id: Ignored = UNSET

    def ignored(self) -> list[str]:
        """All given fields without an effect, including those of blocks and tools."""
        return sorted(set(_ignored(self, "")))


class CountTokens(Messages):
    """The body of ``/v1/messages/count_tokens``."""


class CreateMessage(Messages, kw_only=True):
    """The body of ``/v1/messages``."""

    IGNORED: ClassVar[frozenset[str]] = Messages.IGNORED | {
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
    }

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: Temperature | None = None
    """Default: 1."""
    top_p: TopP | None = None
    top_k: TopK | None = None
    diagnostics: Ignored = UNSET
    inference_geo: Ignored = UNSET
    metadata: Ignored = UNSET
    service_tier: Ignored = UNSET


class TokenCount(Struct):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


def _ignored(value: Any, path: str) -> Iterator[str]:
    """The fields in ``value`` that have no effect. ``[]`` in a name stands for any list element."""
    if isinstance(value, list):
        for element in value:
            yield from _ignored(element, f"{path}[]")
    elif isinstance(value, Body):
        for name in value.__struct_fields__:
            inner = f"{path}.{name}" if path else name
            if name not in value.IGNORED:
                yield from _ignored(getattr(value, name), inner)
            elif getattr(value, name) is not UNSET:
                yield inner
