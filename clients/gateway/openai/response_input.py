"""The input of ``/v1/responses``: its items, and their translation to turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ..bodies.leniency import Ignored, decode
from ..bodies.reading import Body
from ..bodies.wrong_values import refusal
from ..conversation.parts import Call, Part, Result, Text, Thinking, Turn, texts_of
from .response_tools import AnyTool, OfferedTools


class InputText(Body, tag="input_text", tag_field="type"):
    """Text of the user or the developer."""

    text: str


class ChatText(InputText, tag="text"):
    """Text in the form that chat completions have."""


class OutputText(InputText, tag="output_text"):
    """Text of an earlier answer."""


InputContent = str | list[InputText | ChatText | OutputText]


class InputMessage(Body, tag="message", tag_field="type"):
    """A message; ``type`` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class InputCall(Body, tag="function_call", tag_field="type"):
    """A call of an earlier answer."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class InputCustomCall(Body, tag="custom_tool_call", tag_field="type"):
    """A call, in an earlier answer, of a tool whose input is a text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class InputCallOutput(Body, tag="function_call_output", tag_field="type"):
    """The result of a called function."""

    call_id: str
    output: InputContent


class InputCustomOutput(InputCallOutput, tag="custom_tool_call_output"):
    """The result of a tool whose input is a text."""


class InputBusCall(Body, tag="mcp_call", tag_field="type"):
    """A call that the gateway made for an earlier answer, with its result."""

    id: str
    name: str
    arguments: str
    output: str | None = None
    error: str | None = None
    turn: int | None = None
    """The number of the turn within its answer. Consecutive calls with the same number belong to
    one turn."""


class AdditionalTools(Body, tag="additional_tools", tag_field="type"):
    """Further tools that the model may call."""

    tools: list[AnyTool]


class ReasoningText(Body, tag="reasoning_text", tag_field="type"):
    """A piece of thinking."""

    text: str


class SummaryText(ReasoningText, tag="summary_text"):
    """A piece of a summary of thinking."""


class InputReasoning(Body, tag="reasoning", tag_field="type"):
    """The thinking of an earlier answer. Templates that support thinking show it to the model."""

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    """Used as the thinking if ``content`` is missing."""


InputItem = (
    InputMessage
    | InputCall
    | InputCustomCall
    | InputCallOutput
    | InputCustomOutput
    | InputBusCall
    | InputReasoning
    | AdditionalTools
)


class InputItems(Body):
    """The input of a response."""

    input: list[InputItem]


def read_items(given: str | list[dict[str, Any]], ignored: Ignored) -> InputItems:
    """The items of an ``input``. A text becomes a message of the user. Raises ApiError 400."""
    if isinstance(given, str):
        return InputItems([InputMessage(role="user", content=given)])
    # A dict with a role is a message.
    items = [{"type": "message", **item} if "role" in item else item for item in given]
    try:
        return decode(msgspec.json.encode({"input": items}), InputItems, ignored)
    except msgspec.ValidationError as error:
        raise refusal(error, InputItems, lambda: {"input": items}) from None


def to_turns(
    items: Sequence[InputItem], instructions: str | None, offered: OfferedTools
) -> list[Turn]:
    """The conversation, which begins with ``instructions``. The thinking, the text and the calls of
    one answer become one turn."""
    turns: list[Turn] = []
    if instructions is not None:
        turns.append(Turn("system", [Text(instructions)]))
    results: list[Part] = []
    """The results of the gateway's calls in the last turn. A turn of the user with these results
    follows."""
    turn: int | None = None
    for item in items:
        same = isinstance(item, InputBusCall) and item.turn is not None and item.turn == turn
        if results and not same:
            turns.append(Turn("user", results))
            results = []
        turn = item.turn if isinstance(item, InputBusCall) else None
        match item:
            case InputBusCall():
                _add_to_answer(turns, [Call(item.id, item.name, item.arguments)], ())
                results.append(_result_of(item))
            case InputMessage(role="assistant"):
                _add_to_answer(turns, texts_of(item.content), (Text, Call))
            case InputMessage():
                turns.append(Turn(item.role, [*texts_of(item.content)]))
            case InputReasoning():
                thoughts = [Thinking(one.text) for one in item.content or item.summary or ()]
                _add_to_answer(turns, thoughts, (Text, Call, Thinking))
            case InputCall():
                name = offered.shown(item.namespace, item.name)
                _add_to_answer(turns, [Call(item.call_id, name, item.arguments)], ())
            case InputCustomCall():
                name = offered.shown(item.namespace, item.name)
                _add_to_answer(turns, [Call(item.call_id, name, {"input": item.input})], ())
            case InputCallOutput():
                turns.append(Turn("user", [Result(item.call_id, texts_of(item.output))]))
    if results:
        turns.append(Turn("user", results))
    return turns


def _add_to_answer(turns: list[Turn], parts: Sequence[Part], ends: tuple[type[Part], ...]) -> None:
    """Adds ``parts`` to the assistant's turn at the end of ``turns``. Begins a new turn if the last
    turn is not the assistant's, or if its last part is of a kind in ``ends``.

    ``ends``: the kinds of parts that cannot precede ``parts`` in one answer. Within an answer,
    thinking precedes text, and text precedes calls.
    """
    last = turns[-1] if turns else None
    ended = last is not None and bool(last.parts) and isinstance(last.parts[-1], ends)
    if last is None or last.role != "assistant" or ended:
        last = Turn("assistant", [])
        turns.append(last)
    last.parts += parts


def _result_of(call: InputBusCall) -> Result:
    """The output of a call; without an output, its error."""
    failed = call.output is None
    text = call.error if failed else call.output
    return Result(call.id, [Text(text or "")], call.name, failed)
