"""``/v1/responses``: its request and its answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ..bodies.field_types import (
    MaxThinkingTokens,
    RestOfContext,
    TopLogprobs,
    check_max_tokens,
    limit_of,
)
from ..bodies.leniency import Ignored
from ..bodies.reading import Body
from ..conversation.answer_turns import MaxToolCalls, MaxToolTurns
from ..conversation.constraints import Constraint, Receipt, Schema, json_schema
from ..errors import invalid_field
from .chat_bodies import FunctionChoice, NamedBusTool
from .constraints import JsonObjectFormat, JsonSchema, TextFormat
from .fields import TextRequest
from .logprobs import TokenLogprob
from .response_input import ReasoningText
from .response_tools import AnyTool

LOGPROBS = "message.output_text.logprobs"
REASONING = "reasoning.encrypted_content"


class SchemaFormat(JsonSchema, tag="json_schema", tag_field="type"):
    """The format of a text that a JSON schema describes."""

    schema: Schema


class TextSettings(Body):
    """``text``: the format of the answer's text."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class NamedFunction(FunctionChoice, tag="function", tag_field="type"):
    """A ``tool_choice`` that names a function."""


class NamedCustom(NamedFunction, tag="custom"):
    """A ``tool_choice`` that names a tool whose input is a text."""


class ReasoningSettings(Body):
    """``reasoning``: how much the model thinks."""

    effort: str | None = None
    """Passed to templates that have the variable ``reasoning_effort``."""


class ResponsesRequest(TextRequest, kw_only=True):
    """The body of ``POST /v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """A text, or items: messages, function calls and their outputs."""
    instructions: str | None = None
    """The text of a system message that precedes the input."""
    max_output_tokens: RestOfContext | None = None
    """Maximum number of tokens of the answer. The default and -1 allow the rest of the context."""
    text: TextSettings | None = None
    tools: list[AnyTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedFunction | NamedCustom | NamedBusTool | None
    ) = None
    """If the request has tools of the bus, a choice that requires a call applies only to the first
    turn of the answer."""
    parallel_tool_calls: bool | None = None
    max_tool_calls: MaxToolCalls | None = None
    """Maximum number of calls of the bus's tools. Further calls get an error as their result."""
    max_tool_turns: MaxToolTurns | None = None
    """Maximum number of turns that the model generates if the request has tools of the bus. Only
    Tokenbus has this field."""
    top_logprobs: TopLogprobs | None = None
    """Number of alternatives that are reported with each token. Requires
    ``message.output_text.logprobs`` in ``include``."""
    include: list[str] | None = None
    """Names of further parts of the answer. Only ``message.output_text.logprobs`` has an effect."""
    reasoning: ReasoningSettings | None = None
    max_thinking_tokens: MaxThinkingTokens | None = None
    truncation: Literal["disabled", "auto"] | None = None
    """``auto``: the oldest turns are left out if the conversation does not fit into the context."""
    store: bool | None = None
    """Whether the response is stored, so that later requests may refer to it or to its items.
    Default: true, unless the response would copy too much from its request."""
    background: bool | None = None
    """Whether the response is generated even if the client closes its connection."""
    previous_response_id: str | None = None
    """The stored response whose conversation ``input`` continues."""
    metadata: dict[str, Any] | None = None
    """Copied to the response; has no effect."""
    conversation: str | dict[str, Any] | None = None
    """Not supported: the request is refused unless this field is null."""

    def check(self) -> None:
        """Raises ApiError 400 if fields contradict each other or are not supported."""
        check_max_tokens("max_output_tokens", self.max_output_tokens)
        if self.conversation is not None:
            raise invalid_field(
                "conversation",
                "conversation is not supported; give 'previous_response_id', or send the whole "
                "conversation as 'input'",
            )
        if self.background and self.store is False:
            raise invalid_field(
                "store", "a response in the background is stored; leave out store or background"
            )
        if self.top_logprobs and not self.with_logprobs:
            raise invalid_field(
                "top_logprobs", f"top_logprobs is given without {LOGPROBS!r} in 'include'"
            )

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer; None if only the context bounds them."""
        return limit_of(self.max_output_tokens)

    @property
    def num_alternatives(self) -> int | None:
        """Number of alternatives that are reported with each token."""
        return self.top_logprobs

    @property
    def with_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return LOGPROBS in (self.include or ())

    def check_include(self, ignored: Ignored) -> None:
        """If parts of ``include`` have no effect, adds their names to ``ignored``. Raises ApiError
        400 for an unknown part if the setting ``strict_fields`` is on."""
        for place, name in enumerate(self.include or ()):
            if name == REASONING:
                ignored.add(f"include: {REASONING}")
            elif name != LOGPROBS:
                what = f"include[{place}]: {name!r} is not supported; supported: {LOGPROBS}"
                ignored.leave_out(f"include[{place}]", what)

    @property
    def format_constraint(self) -> Constraint | None:
        """The constraint of ``text.format``."""
        given = self.text.format if self.text is not None else None
        match given:
            case JsonObjectFormat():
                return given.constraint("text.format")
            case SchemaFormat(schema=schema, strict=strict):
                return json_schema(schema, "text.format.schema", strict)
        return None


class AnsweredText(Struct):
    """The text of an output message."""

    text: str
    logprobs: list[TokenLogprob]
    annotations: list[Any]
    type: Literal["output_text"] = "output_text"


class OutputMessage(Struct, tag="message", tag_field="type"):
    """A message of the answer."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[AnsweredText]
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, tag="function_call", tag_field="type"):
    """A call of a function, as an item of the answer."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]
    namespace: str | UnsetType = UNSET
    """The namespace of the function, if it has one."""


class OutputCustomCall(Struct, tag="custom_tool_call", tag_field="type"):
    """A call of a tool whose input is a text."""

    id: str
    call_id: str
    name: str
    input: str
    status: Literal["in_progress", "completed", "incomplete"]
    namespace: str | UnsetType = UNSET


class OutputBusCall(Struct, kw_only=True, tag="mcp_call", tag_field="type"):
    """A call that the gateway has made: a call of a tool of the bus, in the form of OpenAI's calls
    of MCP servers."""

    id: str
    name: str
    arguments: str
    server_label: str = "tokenbus"
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: str | None = None
    """The result as text, which the model receives."""
    error: str | None = None
    approval_request_id: None = None
    turn: int = 0
    """The number of the model's turn within the answer. Calls of one turn have the same number.
    Only Tokenbus has this field."""


class OutputReasoning(Struct, tag="reasoning", tag_field="type"):
    """The model's thinking, if its template supports thinking."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[ReasoningText]
    summary: list[Any] = []


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputBusCall | OutputReasoning


class InputDetails(Struct):
    """The field ``input_tokens_details``."""

    cached_tokens: int
    """Number of tokens of the prompt that were in the GPU worker's KV cache."""


class OutputDetails(Struct):
    """The field ``output_tokens_details``."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """``usage`` of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Struct):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens", "max_tool_turns", "context_length_exceeded"]
    """``context_length_exceeded``: the result of a call that the gateway has made does not fit into
    the context."""


class Failure(Struct):
    """The reason why a response failed."""

    code: str
    message: str


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseAnswer(Struct, kw_only=True):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since 1970."""
    status: ResponseStatus
    background: bool = False
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    max_thinking_tokens: MaxThinkingTokens | None = None
    max_tool_calls: int | None = None
    truncation: Literal["disabled", "auto"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, Any] = {}
    tokenbus: Receipt | UnsetType = UNSET
