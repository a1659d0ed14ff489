"""``/v1/chat/completions``: its request and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol

from msgspec import UNSET, Meta, Struct, UnsetType

from ..bodies.field_types import (
    FunctionName,
    MaxThinkingTokens,
    RestOfContext,
    TopLogprobs,
    check_max_tokens,
    limit_of,
)
from ..bodies.reading import Body
from ..conversation.answer_turns import MaxToolCalls, MaxToolTurns
from ..conversation.constraints import Receipt, Schema
from ..conversation.parts import Conversation, Fitting, Rendering
from ..conversation.tools import Tool
from ..errors import invalid_field
from ..tokenization import num_items
from .fields import SampledRequest
from .logprobs import ChatLogprobs
from .messages import CalledFunction, Message, MessageCall, to_turns
from .prompt_logprobs import PromptLogprobs
from .token_fields import TokenFields
from .usage import Usage


class FunctionTool(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    """The JSON schema of the arguments; null if the function does not have arguments."""
    strict: bool | None = None
    """Whether the request is refused if the schema has keywords that masks cannot enforce."""

    def to_tool(self) -> Tool:
        """The function as a tool of the conversation."""
        return Tool(self.name, self.description, self.parameters, self.strict)


class ChatTool(Body, tag="function", tag_field="type"):
    """A function. The client makes the model's calls of this function."""

    function: FunctionTool


class BusTool(Body, tag="bus", tag_field="type"):
    """A tool that a tool worker serves. The gateway makes the model's calls of this tool."""

    name: FunctionName


class FunctionChoice(Body):
    """The function that a ``tool_choice`` names."""

    name: str


class NamedTool(Body, tag="function", tag_field="type"):
    """A ``tool_choice`` that names a function."""

    function: FunctionChoice


class NamedBusTool(FunctionChoice, tag="bus", tag_field="type"):
    """A ``tool_choice`` that names a tool of the bus."""


class TemplateFields(Protocol):
    """The fields that control the rendering of messages, with vLLM's names."""

    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def rendering_of(fields: TemplateFields) -> Rendering:
    """The chat template of the request, the template's variables, and where the prompt ends."""
    variables = dict(fields.chat_template_kwargs or {})
    if fields.documents is not None:
        variables["documents"] = fields.documents
    generation = fields.add_generation_prompt is not False
    continues = bool(fields.continue_final_message)
    return Rendering(fields.chat_template, variables, generation, continues)


class ChatRequest(SampledRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    bus_fields: ClassVar[Mapping[str, str]] = {"prompt": "messages"}
    call_prefix: ClassVar[str] = "call_"

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: RestOfContext | None = None
    """The older name of ``max_completion_tokens``."""
    max_completion_tokens: RestOfContext | None = None
    """Maximum number of tokens of the answer. The default and -1 allow the rest of the context."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    """Number of alternatives that are reported with each token. Requires ``logprobs``."""
    tools: list[ChatTool | BusTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | NamedBusTool | None = None
    """Default: ``auto``. If the request has tools of the bus, a choice that requires a call applies
    only to the first turn of the answer."""
    functions: list[FunctionTool] | None = None
    """The older form of ``tools``. The answer then has ``function_call``, not ``tool_calls``."""
    function_call: Literal["none", "auto"] | FunctionChoice | None = None
    """The older form of ``tool_choice``."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Default: true."""
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    """Passed to the chat template if the template has the variable ``reasoning_effort``."""

    # Fields that vLLM adds.
    chat_template: str | None = None
    """A Jinja template that replaces the model's template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template."""
    documents: list[dict[str, Any]] | None = None
    """Documents for templates that support them."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends at the beginning of an assistant's message. Default: true."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, so that the prompt ends inside it. Requires
    ``add_generation_prompt: false``."""

    # Fields that only Tokenbus has.
    max_tool_turns: MaxToolTurns | None = None
    """Maximum number of turns that the model generates if the request has tools of the bus."""
    max_tool_calls: MaxToolCalls | None = None
    """Maximum number of calls of the bus's tools. Further calls get an error as their result."""
    max_thinking_tokens: MaxThinkingTokens | None = None
    """Maximum number of thinking tokens, after which thinking is closed. Requires a model whose
    template supports thinking."""
    separate_reasoning: bool | None = None
    """Whether thinking is reported in ``reasoning_content``, and not in ``content``. Default:
    true."""

    def check(self) -> None:
        """Raises ApiError 400 if fields contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise invalid_field(
                "top_logprobs", "top_logprobs is given without logprobs; set logprobs to true"
            )
        if self.functions and self.tools:
            raise invalid_field("functions", "functions and tools cannot be combined; give tools")
        self.check_prompt()
        check_max_tokens("max_tokens", self.max_tokens)
        check_max_tokens("max_completion_tokens", self.max_completion_tokens)
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid_field(
                "max_tokens",
                f"max_tokens is {self.max_tokens} and max_completion_tokens is "
                f"{self.max_completion_tokens}; give one of them",
            )

        if self.bus_tools:
            self._check_with_bus_tools()

    def _check_with_bus_tools(self) -> None:
        """Raises ApiError 400 if a field is given that applies only to an answer of one turn."""
        wrong = {
            "n": (self.n or 1) > 1,
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt": self.add_generation_prompt is False,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "return_token_ids": self.return_token_ids,
            "processed_logprobs": self.processed_logprobs,
            "kept": self.kept,
        }
        for name, given in wrong.items():
            if given:
                raise invalid_field(
                    name,
                    f"{name} cannot be combined with tools of the type 'bus', whose answer has "
                    f"several turns; leave out {name}",
                )

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer; None if only the context bounds them."""
        return limit_of(self.max_completion_tokens or self.max_tokens)

    @property
    def num_alternatives(self) -> int | None:
        """Number of alternatives that are reported with each token."""
        return self.top_logprobs

    @property
    def bus_tools(self) -> list[str]:
        """The names of the tools of the bus that the model may call."""
        if self.tool_choice == "none":
            return []
        return [tool.name for tool in self.tools or () if isinstance(tool, BusTool)]

    @property
    def num_items(self) -> int:
        """The number of messages, parts of messages, and tools."""
        return num_items(self.messages, self.tools)

    def to_conversation(self, served: Mapping[str, Tool] | None = None) -> Conversation:
        """The conversation to continue. ``served``: the descriptions of the request's tools of the
        bus by name, or None if the interface does not allow such tools. Raises ApiError 400."""
        tools = self._tools(served)
        parallel = self.parallel_tool_calls
        if self.functions:
            tools = [function.to_tool() for function in self.functions]
            parallel = False
        rules = self.answer_rules(self._choice, parallel, bool(tools))
        rules.max_thinking_tokens = self.max_thinking_tokens
        rules.separate_reasoning = self.separate_reasoning is not False
        rendering = rendering_of(self)
        rendering.effort = self.reasoning_effort
        fitting = Fitting(last_tokens=self.truncate_prompt_tokens)
        return Conversation(to_turns(self.messages), tools, rules, rendering, fitting)

    def _tools(self, served: Mapping[str, Tool] | None) -> list[Tool]:
        if served is None and self.bus_tools:
            raise invalid_field(
                "tools",
                "tools of the type 'bus' are available only in POST /v1/chat/completions, "
                "/v1/responses and /v1/messages; give functions",
            )
        known = served or {}
        return [
            tool.function.to_tool() if isinstance(tool, ChatTool) else known[tool.name]
            for tool in self.tools or ()
            if isinstance(tool, ChatTool) or tool.name in known
        ]

    @property
    def _choice(self) -> str | None:
        """The value of ``AnswerRules.choice``, or None for ``auto``."""
        if isinstance(self.tool_choice, NamedBusTool):
            return f":{self.tool_choice.name}"
        if isinstance(self.tool_choice, NamedTool):
            return f":{self.tool_choice.function.name}"
        if isinstance(self.function_call, FunctionChoice):
            return f":{self.function_call.name}"
        return self.tool_choice or self.function_call


class AnsweredMessage(Struct):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The thinking, if the model's template supports it."""
    tool_calls: list[MessageCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    """The call, if the request has ``functions``."""


class ChatChoice(TokenFields):
    """A choice of a chat."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    """``stop``, ``length``, ``tool_calls``, ``function_call`` or ``error``."""
    tokenbus: Receipt | UnsetType = UNSET


class ChatCompletion(Struct):
    """The answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    """If the request has ``return_token_ids``: the token ids of the prompt."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    """A piece of the function of a call: its name, or text of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """A piece of a call. The first piece has the call's id and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    """A piece of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(TokenFields):
    """A choice of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    tokenbus: Receipt | UnsetType = UNSET


class ChatChunk(Struct):
    """A chunk of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In the first chunk, if the request has ``return_token_ids``: the token ids of the prompt."""
