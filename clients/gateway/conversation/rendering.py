"""Renders a conversation to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from ..bodies.leniency import Ignored
from ..bodies.reading import check_inner
from ..errors import invalid_field
from ..models import ModelTable, ServedModel
from ..templates.templates import TemplateRefusalError, Templates, template_of
from . import tools
from .order import arrangements, without_developers
from .parts import Call, Conversation, Rendering, Result, Text, Turn, of_kind, text_of, thinking_of


class Resources(Protocol):
    """The objects that the preparation of an answer needs: the models of the bus, and the renderer
    of their templates. ``Gateway`` has them for HTTP requests, and ``Chats`` in
    ``clients/chats.py`` has them for a Python client."""

    models: ModelTable
    templates: Templates


async def prompt_ids(
    resources: Resources, model: ServedModel, conversation: Conversation, ignored: Ignored
) -> list[int]:
    """The token ids of a conversation. If the template refuses the order of the turns, they are
    rearranged (``order.py``). Raises ApiError 400 if the template refuses every arrangement, and
    RequestError if the texts are too long for the model."""
    if conversation.rendering.chat_template is None:
        # A template in a request may leave out messages. The models' templates leave out thinking.
        model.check_chars(_num_chars(conversation.turns))
    text, _ = await rendered(resources.templates, model, conversation, ignored)
    return await model.tokenize(text, special=conversation.rendering.special)


def _num_chars(turns: Sequence[Turn]) -> int:
    """Number of characters of the texts of messages and results, without thinking and calls."""
    parts = [part for turn in turns for part in turn.parts]
    inner = [one for result in of_kind(parts, Result) for one in result.parts]
    return sum(len(part.text) for part in (*of_kind(parts, Text), *inner))


async def rendered(
    templates: Templates, model: ServedModel, conversation: Conversation, ignored: Ignored
) -> tuple[str, list[Turn]]:
    """The prompt's text, and the first arrangement of the turns that the template accepts."""
    how = conversation.rendering
    if how.add_generation_prompt and how.continue_final_message:
        raise invalid_field(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; set "
            "add_generation_prompt to false",
        )
    template = template_of(model) if how.chat_template is None else how.chat_template
    turns = conversation.turns
    if "developer" not in template:
        turns = without_developers(turns)
    variables = _variables(template, how, ignored)
    refused: TemplateRefusalError | None = None
    for arranged in arrangements(turns):
        size = sum(1 + len(turn.parts) for turn in arranged)
        messages = await model.tokenization.prepare(size, partial(for_template, arranged))
        try:
            text = await templates.render(
                model,
                messages,
                tools=tools.for_template(conversation.offered),
                chat_template=how.chat_template,
                variables=variables,
                add_generation_prompt=how.add_generation_prompt,
                continue_final_message=how.continue_final_message,
            )
        except TemplateRefusalError as error:
            refused = refused or error
        else:
            return text, arranged
    assert refused is not None
    raise refused


def _variables(template: str, how: Rendering, ignored: Ignored) -> dict[str, Any]:
    if how.effort is None or "reasoning_effort" in how.variables:
        return how.variables
    if "reasoning_effort" not in template:
        ignored.add(how.effort_field)
        return how.variables
    return {**how.variables, "reasoning_effort": how.effort}


def for_template(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Converts the turns to messages for templates. The content of each message is a text, and the
    arguments of calls are objects. Raises ApiError 413 if the arguments have too many values."""
    calls = [call for turn in turns for call in of_kind(turn.parts, Call)]
    check_inner([call.arguments for call in calls if isinstance(call.arguments, str)])
    names = {call.id: call.name for call in calls}
    return [message for turn in turns for message in _messages(turn, names)]


def _messages(turn: Turn, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The messages of a turn: one for each result, and one for all other parts. ``names``: the
    names of called functions by the ids of calls."""
    results = of_kind(turn.parts, Result)
    for result in results:
        yield _result(result, names)
    if results and len(results) == len(turn.parts):
        return
    message: dict[str, Any] = {"role": turn.role, "content": text_of(turn.parts)}
    if turn.name is not None:
        message["name"] = turn.name
    thinking = thinking_of(turn.parts)
    if thinking is not None:
        message["reasoning_content"] = thinking
    calls = of_kind(turn.parts, Call)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    yield message


def _result(result: Result, names: dict[str, str]) -> dict[str, Any]:
    text = text_of(result.parts)
    message = {
        "role": "tool",
        "tool_call_id": result.call_id,
        "content": f"Error: {text}" if result.failed else text,
    }
    name = result.name or names.get(result.call_id)
    return message if name is None else {**message, "name": name}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(given: str | dict[str, Any]) -> Any:
    """The arguments of a call as an object, because templates format arguments themselves. A text
    that is not a JSON object, for example in an answer that was cut, is returned unchanged."""
    if isinstance(given, dict):
        return given
    try:
        arguments = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError):
        return given
    return arguments if isinstance(arguments, dict) else given
