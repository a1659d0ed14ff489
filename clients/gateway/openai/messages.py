"""The messages of a chat, and their translation to turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..bodies.reading import Body
from ..conversation.parts import Call, Part, Result, Text, Thinking, Turn, texts_of


class TextPart(Body, tag="text", tag_field="type"):
    """A part of a message's content. Images, audio and files are left out of the content
    (``leniency.py``)."""

    text: str


Content = str | list[TextPart]


class CalledFunction(Body):
    """The function of a call."""

    name: str
    arguments: str
    """The arguments as JSON text. In an answer, the function's schema allows the text, unless
    ``finish_reason`` is ``length``. In a request, the text is not checked."""


class MessageCall(Body):
    """A call in an assistant's message, in a request or an answer."""

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


class FunctionMessage(Body, tag="function", tag_field="role"):
    """The result of a called function, in the older form."""

    content: Content | None
    name: str


class AssistantMessage(Body, tag="assistant", tag_field="role"):
    """An assistant's message. It has all fields of the message in an answer (``AnsweredMessage``),
    so a client can send an answer back as it is."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    reasoning_content: str | None = None
    """The thinking of the message, which is passed to the chat template."""
    refusal: str | None = None
    """The text that the model sees if ``content`` is missing or empty."""
    audio: None = None
    function_call: CalledFunction | None = None
    """The older form of ``tool_calls``."""


Message = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)


def to_turns(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a conversation."""
    return [_turn(message) for message in messages]


def _turn(message: Message) -> Turn:
    parts: list[Part] = [*texts_of(message.content)]
    match message:
        case ToolMessage():
            result = Result(message.tool_call_id, texts_of(message.content), message.name)
            return Turn("user", [result])
        case FunctionMessage(name=name):
            # Calls in the older form do not have ids, so the function's name serves as the id.
            return Turn("user", [Result(name, texts_of(message.content), name)])
        case AssistantMessage():
            if not message.content and message.refusal:
                parts = [Text(message.refusal)]
            if message.reasoning_content is not None:
                parts.append(Thinking(message.reasoning_content))
            for call in message.tool_calls or ():
                parts.append(Call(call.id, call.function.name, call.function.arguments))
            if (called := message.function_call) is not None:
                parts.append(Call(called.name, called.name, called.arguments))
            return Turn("assistant", parts, message.name)
        case SystemMessage():
            return Turn("system", parts, message.name)
        case DeveloperMessage():
            return Turn("developer", parts, message.name)
        case UserMessage():
            return Turn("user", parts, message.name)
