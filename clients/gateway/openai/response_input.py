"""The input of ``/v1/responses``: its items, and their conversion to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..bodies import Body, split_validation
from ..errors import field_name, invalid_field
from .messages import (
    AssistantMessage,
    CalledFunction,
    Message,
    MessageCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
)


class InputText(Body, tag="input_text", tag_field="type"):
    """Text of the user or the developer."""

    text: str


class OutputText(Body, tag="output_text", tag_field="type"):
    """Text of an earlier answer."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed"})

    text: str
    annotations: list[Any] | UnsetType | None = UNSET
    logprobs: list[Any] | UnsetType | None = UNSET
    parsed: Any = UNSET
    """This field is accepted because the openai package adds it to answers."""


InputContent = str | list[InputText | OutputText]


class InputMessage(Body, tag="message", tag_field="type"):
    """A message; ``type`` may be left out."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent
    id: str | UnsetType | None = UNSET
    status: str | UnsetType | None = UNSET
    phase: str | UnsetType | None = UNSET


class InputCall(Body, tag="function_call", tag_field="type"):
    """A call of an earlier answer."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "parsed_arguments"})

    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = UNSET
    """This field is accepted because the openai package adds it to answers."""
    id: str | UnsetType | None = UNSET
    status: str | UnsetType | None = UNSET


class InputCallOutput(Body, tag="function_call_output", tag_field="type"):
    """The result of a called function."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    call_id: str
    output: InputContent
    id: str | UnsetType | None = UNSET
    status: str | UnsetType | None = UNSET


InputItem = InputMessage | InputCall | InputCallOutput


class InputItems(Body):
    """The input of a response."""

    input: list[InputItem]


def read_items(given: str | list[dict[str, Any]]) -> InputItems:
    """The items of an ``input``. A text becomes a message of the user. Raises ApiError 400."""
    if isinstance(given, str):
        return InputItems([InputMessage(role="user", content=given)])
    # A dict with a role is a message.
    items = [{"type": "message", **item} if "role" in item else item for item in given]
    try:
        return msgspec.convert({"input": items}, InputItems)
    except msgspec.ValidationError as error:
        what, path = split_validation(error)
        raise invalid_field(field_name(path), what) from None


def to_messages(items: Sequence[InputItem], instructions: str | None) -> list[Message]:
    """The conversation, which begins with ``instructions``. Calls are added to the message before
    them."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append(SystemMessage(instructions))
    for item in items:
        match item:
            case InputMessage():
                messages.append(_message(item))
            case InputCallOutput():
                messages.append(ToolMessage(_text(item.output), item.call_id))
            case InputCall():
                if not messages or not isinstance(messages[-1], AssistantMessage):
                    messages.append(AssistantMessage())
                last = messages[-1]
                assert isinstance(last, AssistantMessage)
                function = CalledFunction(item.name, item.arguments)
                last.tool_calls = [*(last.tool_calls or ()), MessageCall(item.call_id, function)]
    return messages


def _message(item: InputMessage) -> Message:
    text = _text(item.content)
    match item.role:
        case "user":
            return UserMessage(text)
        case "assistant":
            return AssistantMessage(text)
        case _:
            return SystemMessage(text)


def _text(content: InputContent) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
