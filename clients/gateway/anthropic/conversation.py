"""Converts a conversation to its prompt and to the constraint of its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..answer_forms import Function, Rest, Wanted
from ..answer_parts import AnswerForm
from ..answer_plan import answer_form
from ..context import Gateway
from ..errors import ApiError, invalid_field
from ..models import ServedModel
from ..templates import template_of
from .bodies import (
    AssistantMessage,
    Conversation,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)


@dataclass(frozen=True)
class Answering:
    """The constraint of the answer."""

    form: AnswerForm | None = None
    """The form of the answer; None: the answer is one text."""
    constraint: str | None = None
    """The name of the constraint in the receipt; None: unconstrained."""
    controller: str = ""
    controller_arg: str | dict[str, Any] = ""


async def prompt_ids(gateway: Gateway, model: ServedModel, body: Conversation) -> list[int]:
    """The token ids of the prompt; raises ApiError 400 if the template refuses the messages."""
    continues = isinstance(body.messages[-1], AssistantMessage)
    if continues and any(isinstance(b, ToolUseBlock) for b in body.messages[-1].content):
        raise _refused(
            f"messages[{len(body.messages) - 1}].content",
            "the last message calls a tool; add a user message with its tool_result",
        )
    text = await gateway.templates.render(
        model,
        list(_messages(body)),
        tools=[_for_template(tool) for tool in _offered(body)],
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    # The template has already written the beginning of the text.
    return await model.tokenize(text, special=False)


def answering(model: ServedModel, body: Conversation, ids: list[int]) -> Answering:
    """The constraint and the form of the answer to a conversation whose prompt is ``ids``; raises
    ApiError 400."""
    schema = None
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema
    tools = _offered(body)
    choice = body.tool_choice
    kind = choice.type if choice is not None else "auto"
    if kind in ("any", "tool") and not tools:
        raise _refused("tool_choice", f"tool_choice is {kind!r} without tools; add tools")
    if kind == "tool":
        tools = [tool for tool in tools if choice is not None and tool.name == choice.name]
        if not tools:
            names = ", ".join(tool.name for tool in body.tools or [])
            raise _refused(
                "tool_choice.name",
                f"tool_choice names {choice and choice.name!r}, which is not one of the tools: "
                f"{names}",
            )
    wanted = Wanted([Function(tool.name, _object_schema(tool)) for tool in tools])
    wanted.parallel = choice is None or not choice.disable_parallel_tool_use
    if body.thinking is not None:
        wanted.max_thinking_tokens = body.thinking.budget_tokens
    if tools and kind != "auto":
        wanted.rest = None
    elif schema is not None:
        wanted.rest = Rest("json_schema", schema)
    field = "thinking.budget_tokens"
    form = answer_form(model, template_of(model), ids, wanted, thinking_field=field)
    label = "tools" if tools else "json_schema" if schema is not None else None
    if form is None:
        return Answering() if schema is None else Answering(None, label, "json_schema", schema)
    if label is None and wanted.max_thinking_tokens is None:
        return Answering(form)
    arg = msgspec.to_builtins(form.automaton.structure)
    return Answering(form, label or "thinking", "structural", arg)


def _offered(body: Conversation) -> list[Tool]:
    """The tools that the answer may call; raises ApiError 400 if two tools have the same name."""
    names: set[str] = set()
    for place, tool in enumerate(body.tools or []):
        if tool.name in names:
            raise _refused(f"tools[{place}].name", f"two tools have the name {tool.name!r}")
        names.add(tool.name)
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    return body.tools or []


def _object_schema(tool: Tool) -> dict[str, Any]:
    kind = tool.input_schema.get("type", "object")
    if kind != "object":
        raise _refused(
            "tools",
            f"the input_schema of {tool.name!r} has the type {kind!r}; it must be an object",
        )
    return {"type": "object", **tool.input_schema}


def _for_template(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": _object_schema(tool),
    }
    return {"type": "function", "function": function}


def _messages(body: Conversation) -> Iterator[dict[str, Any]]:
    """The messages in the form for templates."""
    system = _text(body.system)
    if system:
        yield {"role": "system", "content": system}
    called: dict[str, str] = {}
    for message in body.messages:
        match message:
            case AssistantMessage():
                yield _assistant(message, called)
            case SystemMessage():
                yield {"role": "system", "content": _text(message.content)}
            case UserMessage():
                yield from _user(message, called)


def _assistant(message: AssistantMessage, called: dict[str, str]) -> dict[str, Any]:
    """An assistant's message. Adds the name of each call to ``called``, by the call's id."""
    found: dict[str, Any] = {"role": "assistant", "content": _text(message.content)}
    if isinstance(message.content, str):
        return found
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    if calls:
        called |= {call.id: call.name for call in calls}
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.input},
            }
            for call in calls
        ]
    return found


def _user(message: UserMessage, called: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A user's message: a ``tool`` message for each result, and a user message for all texts."""
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            text = _text(block.content)
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "name": called.get(block.tool_use_id, ""),
                "content": f"Error: {text}" if block.is_error else text,
            }
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if texts or not message.content:
        yield {"role": "user", "content": _text(texts)}


def _text(content: str | Sequence[Any] | None) -> str:
    """The text of a content. Text blocks are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _refused(param: str, message: str) -> ApiError:
    return invalid_field(param, f"{param}: {message}")
