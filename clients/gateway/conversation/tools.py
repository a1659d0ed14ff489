"""The functions that an answer may call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..answer_forms import Function
from ..errors import invalid_field
from .constraints import Schema

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that declares no parameters."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Schema | None = None
    """The JSON schema of the arguments, or None if the function has no arguments."""
    strict: bool | None = None
    """Whether the request is refused if the schema has keywords that masks cannot enforce."""


@dataclass(frozen=True)
class Calling:
    """The functions that an answer may call."""

    functions: list[Function]
    required: bool
    """Whether the answer must call a function and has no text."""
    parallel: bool
    """Whether the answer may have several calls."""


def calling(tools: Sequence[Tool], choice: str, parallel: bool) -> Calling | None:
    """The functions that an answer may call; None if the answer may not call a function.

    ``choice`` is ``none``, ``auto``, ``required``, or a function's name after a colon. Raises
    ApiError 400.
    """
    _check(tools, choice)
    if choice == "none" or not tools:
        return None
    named = choice.removeprefix(":")
    chosen = [tool for tool in tools if tool.name == named] if choice.startswith(":") else tools
    return Calling(
        [Function(tool.name, _object_schema(tool)) for tool in chosen],
        choice != "auto",
        parallel and not choice.startswith(":"),
    )


def _check(tools: Sequence[Tool], choice: str) -> None:
    names: dict[str, None] = {}
    for name in (tool.name for tool in tools):
        if name in names:
            raise invalid_field("tools", f"tools: two tools have the name {name!r}")
        names[name] = None
    if choice == "required" and not names:
        raise invalid_field(
            "tool_choice", "tool_choice requires a call, but the request has no tools; add tools"
        )
    if choice.startswith(":") and choice[1:] not in names:
        raise invalid_field(
            "tool_choice",
            f"tool_choice names the unknown function {choice[1:]!r}; tools has: "
            f"{', '.join(names) or 'none'}",
        )


def _object_schema(tool: Tool) -> Schema:
    if tool.parameters is None:
        return NO_ARGUMENTS
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise invalid_field(
            "tools",
            f"tools: the parameters of {tool.name!r} have the type {kind!r}; the type must be "
            "object",
        )
    return {"type": "object", **tool.parameters}


def for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The functions in the form for chat templates."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or NO_ARGUMENTS,
            },
        }
        for tool in tools
    ]
