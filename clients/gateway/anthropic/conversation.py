"""Translates the messages of a request to a conversation."""

from __future__ import annotations

from collections.abc import Sequence

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
    Messages,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)


def to_conversation(body: Messages) -> Conversation:
    """The conversation to continue. If its last message is the assistant's, the answer continues
    that message. Raises ApiError 400."""
    turns = [_turn(message) for message in body.messages]
    continues = turns[-1].role == "assistant"
    if continues and of_kind(turns[-1].parts, Call):
        field = f"messages[{len(turns) - 1}].content"
        raise invalid_field(
            field,
            f"{field}: the last message calls a tool; add a user message with its tool_result",
        )
    system = _parts(body.system)
    if text_of(system):
        turns.insert(0, Turn("system", system))
    tools = [Tool(t.name, t.description, t.input_schema, t.strict) for t in body.tools or ()]
    rendering = Rendering(
        add_generation_prompt=not continues,
        continue_final_message=continues,
        effort=body.output_config.effort if body.output_config is not None else None,
        effort_field="output_config.effort",
    )
    return Conversation(turns, tools, _rules(body), rendering)


def _rules(body: Messages) -> AnswerRules:
    rules = AnswerRules(thinking_field="thinking.budget_tokens", thinking_is_optional=True)
    choice = body.tool_choice
    if choice is not None:
        forced = f":{choice.name}" if choice.type == "tool" else "required"
        rules.choice = choice.type if choice.type in ("auto", "none") else forced
        rules.parallel = not choice.disable_parallel_tool_use
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema
        rules.constraint = json_schema(schema, "output_config.format.schema", strict=False)
    if body.thinking is not None:
        rules.max_thinking_tokens = body.thinking.budget_tokens
    return rules


def _turn(message: UserMessage | AssistantMessage | SystemMessage) -> Turn:
    parts = _parts(message.content)
    match message:
        case UserMessage():
            return Turn("user", parts)
        case AssistantMessage():
            return Turn("assistant", parts)
        case SystemMessage():
            return Turn("system", parts)


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
        case ToolUseBlock():
            return Call(block.id, block.name, block.input)
        case ToolResultBlock():
            texts = of_kind(_parts(block.content), Text)
            return Result(block.tool_use_id, texts, failed=bool(block.is_error))
    raise AssertionError(block)
