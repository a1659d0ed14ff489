"""Translates the messages of a request to a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from ..conversation.constraints import json_schema
from ..conversation.parts import (
    AnswerRules,
    Call,
    Conversation,
    Part,
    Rendering,
    Result,
    Text,
    Thinking,
    Turn,
    of_kind,
    text_of,
)
from ..conversation.tools import Tool
from ..errors import invalid_field
from .bodies import (
    AssistantMessage,
    Block,
    BusCallBlock,
    BusResultBlock,
    Messages,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)


def to_conversation(body: Messages, served: Mapping[str, Tool] | None = None) -> Conversation:
    """The conversation to continue. If its last message is the assistant's, the answer continues
    that message. ``served``: descriptions of the request's tools with the type ``bus``, by name.
    Raises ApiError 400."""
    served = served or {}
    turns = [turn for message in body.messages for turn in _turns(message)]
    continues = turns[-1].role == "assistant"
    field = f"messages[{len(body.messages) - 1}].content"
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
    system = _parts(body.system)
    if text_of(system):
        turns.insert(0, Turn("system", system))
    tools = list(_tools(body, served))
    rendering = Rendering(
        add_generation_prompt=not continues,
        continue_final_message=continues,
        effort=body.output_config.effort if body.output_config is not None else None,
        effort_field="output_config.effort",
    )
    return Conversation(turns, tools, _rules(body), rendering)


def _tools(body: Messages, served: Mapping[str, Tool]) -> Iterator[Tool]:
    for place, tool in enumerate(body.tools or ()):
        if tool.type == "bus":
            if tool.name in served:
                yield served[tool.name]
        elif tool.input_schema is None:
            field = f"tools[{place}].input_schema"
            raise invalid_field(field, f"the field {field!r} is missing")
        else:
            yield Tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _rules(body: Messages) -> AnswerRules:
    rules = AnswerRules(thinking_field="thinking.budget_tokens", thinking_is_optional=True)
    choice = body.tool_choice
    if choice is not None:
        if choice.type == "tool" and not choice.name:
            raise invalid_field("tool_choice.name", "the field 'tool_choice.name' is missing")
        forced = f":{choice.name}" if choice.type == "tool" else "required"
        rules.choice = choice.type if choice.type in ("auto", "none") else forced
        rules.parallel = not choice.disable_parallel_tool_use
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema
        rules.constraint = json_schema(schema, "output_config.format.schema", strict=False)
    if body.thinking is not None:
        rules.max_thinking_tokens = body.thinking.budget_tokens
    return rules


def _turns(message: UserMessage | AssistantMessage | SystemMessage) -> list[Turn]:
    """The turns of a message. An assistant's message may contain results of calls that the gateway
    has made for an earlier answer. Then it is split, and the results become turns of the user."""
    parts = _parts(message.content)
    match message:
        case UserMessage():
            return [Turn("user", parts)]
        case SystemMessage():
            return [Turn("system", parts)]
    groups = groupby(parts, lambda part: isinstance(part, Result))
    turns = [Turn("user" if made else "assistant", list(group)) for made, group in groups]
    return turns or [Turn("assistant", [])]


def _parts(content: str | Sequence[Block] | None) -> list[Part]:
    if isinstance(content, str):
        return [Text(content)] if content else []
    return [_part(block) for block in content or ()]


def _part(block: Block) -> Part:
    match block:
        case TextBlock(text=text):
            return Text(text)
        case ThinkingBlock(thinking=text):
            return Thinking(text)
        case ToolUseBlock() | BusCallBlock():
            return Call(block.id, block.name, block.input)
        case ToolResultBlock() | BusResultBlock():
            texts = of_kind(_parts(block.content), Text)
            return Result(block.tool_use_id, texts, failed=bool(block.is_error))
    raise AssertionError(block)
