"""The bodies of the requests of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ... import GenerateOptions
from ..bodies.field_types import (
    MaxThinkingTokens,
    MaxTokens,
    MaybeStops,
    Temperature,
    TopK,
    TopPOrZero,
    kept_tokens,
    stops_of,
)
from ..bodies.reading import Body
from ..conversation.answer_turns import MaxToolTurns
from ..conversation.constraints import Constraint, Schema, json_schema
from ..conversation.parts import (
    AnswerRules,
    Call,
    Conversation,
    Rendering,
    Turn,
    of_kind,
    text_of,
)
from ..conversation.tools import Tool as OfferedTool
from ..errors import ApiError, invalid_field
from ..tokenization import num_items
from .content import Message, TextBlock, to_parts, to_turns

ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]


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

    @property
    def choice(self) -> str:
        """The value of ``AnswerRules.choice``. Raises ApiError 400."""
        if self.type == "tool" and not self.name:
            raise invalid_field("tool_choice.name", "the field 'tool_choice.name' is missing")
        return {"any": "required", "tool": f":{self.name}"}.get(self.type, self.type)


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

    max_tool_calls: ClassVar[int | None] = None

    @property
    def num_items(self) -> int:
        """The number of messages, blocks and tools."""
        return num_items(self.messages, self.tools)

    @property
    def bus_tools(self) -> list[str]:
        """The names of the tools of the bus that the model may call."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [tool.name for tool in self.tools or () if tool.type == "bus"]

    def check(self) -> None:
        """Raises ApiError 400 if the request refers to a thread."""
        if self.thread is not None:
            raise ApiError(
                400,
                "thread: messages are not stored; send the whole conversation as messages",
                code="thread_unsupported_request",
                param="thread",
            )

    def to_conversation(self, served: Mapping[str, OfferedTool]) -> Conversation:
        """The conversation to continue. If its last message is the assistant's, the answer
        continues that message. ``served``: the tools of the bus by name, as their tool workers
        describe them. Raises ApiError 400."""
        turns = to_turns(self.messages)
        continues = turns[-1].role == "assistant"
        field = f"messages[{len(self.messages) - 1}].content"
        if continues and served:
            raise invalid_field(
                field,
                f"{field}: an answer with tools of the type 'bus' cannot continue a message; add a "
                "user message",
            )
        if continues and of_kind(turns[-1].parts, Call):
            raise invalid_field(
                field,
                f"{field}: the last message calls a tool; add a user message with its tool_result",
            )
        system = to_parts(self.system)
        if text_of(system):
            turns.insert(0, Turn("system", system))
        rendering = Rendering(
            add_generation_prompt=not continues,
            continue_final_message=continues,
            effort=None if self.output_config is None else self.output_config.effort,
            effort_field="output_config.effort",
        )
        return Conversation(turns, list(self._tools(served)), self._rules(), rendering)

    def _tools(self, served: Mapping[str, OfferedTool]) -> Iterator[OfferedTool]:
        for place, tool in enumerate(self.tools or ()):
            if tool.type == "bus":
                if tool.name in served:
                    yield served[tool.name]
            elif tool.input_schema is None:
                field = f"tools[{place}].input_schema"
                raise invalid_field(field, f"the field {field!r} is missing")
            else:
                yield OfferedTool(tool.name, tool.description, tool.input_schema, tool.strict)

    def _rules(self) -> AnswerRules:
        rules = AnswerRules(thinking_field="thinking.budget_tokens", thinking_is_optional=True)
        choice = self.tool_choice
        if choice is not None:
            rules.choice, rules.parallel = choice.choice, not choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.schema
            rules.constraint = json_schema(schema, "output_config.format.schema", strict=False)
        if self.thinking is not None:
            rules.max_thinking_tokens = self.thinking.budget_tokens
        return rules


class CountTokens(Messages):
    """The body of ``/v1/messages/count_tokens``."""


class CreateMessage(Messages, kw_only=True):
    """The body of ``/v1/messages``."""

    bus_fields: ClassVar[Mapping[str, str]] = {"prompt": "messages"}
    call_prefix: ClassVar[str] = "toolu_"

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

    @property
    def limit(self) -> int:
        """Maximum number of tokens of the answer."""
        return self.max_tokens

    def options(self, constraint: Constraint | None) -> GenerateOptions:
        """Converts the fields of this body to options of ``generate``, except the model."""
        options: GenerateOptions = {
            "text": True,
            "max_tokens": self.max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "stop": stops_of(self.stop_sequences),
            **kept_tokens(self.top_p, self.top_k),
        }
        return options if constraint is None else {**options, **constraint.options}


class TokenCount(Struct):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
