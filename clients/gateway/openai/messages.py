"""The messages of a conversation, and their conversion to the form for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..bodies import Body, check_inner

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]


class TextPart(Body, tag="text", tag_field="type"):
    """A part of a content. Images, audio and files are refused."""

    text: str


Content = str | list[TextPart]


class CalledFunction(Body):
    """The function of a call in a message."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str
    arguments: str
    """The arguments as JSON text, unchanged from the model's output."""
    parsed_arguments: Any = UNSET
    """This field is accepted because the openai package adds it to answers."""


class MessageCall(Body):
    """A call in an assistant's message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class SystemMessage(Body, tag="system", tag_field="role"):
    """Instructions for the assistant."""

    content: Content
    name: str | None = None


class DeveloperMessage(Body, tag="developer", tag_field="role"):
    """Instructions for the assistant, like a system message."""

    content: Content
    name: str | None = None


class UserMessage(Body, tag="user", tag_field="role"):
    """The user's text."""

    content: Content
    name: str | None = None


class ToolMessage(Body, tag="tool", tag_field="role"):
    """The result of a called function."""

    content: Content
    tool_call_id: str
    name: str | None = None


class AssistantMessage(Body, tag="assistant", tag_field="role"):
    """An assistant's message, in the form of an answer."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations", "parsed"})

    content: Content | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    reasoning_content: str | None = None
    """Passed to the template."""
    refusal: str | None = None
    """The content for the model if ``content`` is missing."""
    annotations: list[Any] | UnsetType | None = UNSET
    parsed: Any = UNSET
    """This field is accepted because the openai package adds it to answers."""
    audio: None = None
    function_call: None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def text_of(content: Content | None) -> str:
    """A content as one text. Parts are joined by line breaks, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for templates. Each content is a text, and arguments are objects. Raises
    ApiError 413 if the arguments have too many values."""
    check_inner(
        [
            call.function.arguments
            for message in messages
            if isinstance(message, AssistantMessage)
            for call in message.tool_calls or ()
        ]
    )
    return [_for_template(message) for message in messages]


def _for_template(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {
        "role": message.__struct_config__.tag,
        "content": text_of(message.content),
    }
    if message.name is not None:
        found["name"] = message.name
    match message:
        case ToolMessage():
            found["tool_call_id"] = message.tool_call_id
        case AssistantMessage():
            found["content"] = found["content"] or message.refusal or ""
            if message.reasoning_content is not None:
                found["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _call(call: MessageCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """The arguments as an object, which templates format themselves. Text that is not a JSON
    object, such as that of a cut answer, is not changed."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
