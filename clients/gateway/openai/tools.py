"""Tools and ``tool_choice``: the functions that an answer may call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..answer_forms import Function
from ..bodies import Body
from ..errors import invalid_field
from .constraints import Schema
from .messages import FunctionName

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that declares no parameters."""


class FunctionTool(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    """The JSON schema of the arguments; null: the function has no arguments."""
    strict: bool | None = None
    """This field has no effect, because the schema is always enforced."""


class Tool(Body, tag="function", tag_field="type"):
    """A tool. Only functions are supported."""

    function: FunctionTool


class FunctionChoice(Body):
    """The function that a ``tool_choice`` names."""

    name: str


class NamedTool(Body, tag="function", tag_field="type"):
    """A ``tool_choice`` that names a function."""

    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class Calling:
    """The functions that an answer may call."""

    functions: list[Function]
    required: bool
    """Whether the answer must call a function and has no text."""
    parallel: bool
    """Whether the answer may have several calls."""


def calling(functions: Sequence[FunctionTool], choice: str, parallel: bool) -> Calling | None:
    """The functions that an answer may call; None if it may not call a function.

    ``choice`` is ``none``, ``auto``, ``required``, or a function's name after a colon. Raises
    ApiError 400.
    """
    _check(functions, choice)
    if choice == "none" or not functions:
        return None
    named = choice.removeprefix(":")
    chosen = [f for f in functions if f.name == named] if choice.startswith(":") else functions
    return Calling(
        [Function(f.name, _object_schema(f)) for f in chosen],
        choice != "auto",
        parallel and not choice.startswith(":"),
    )


def _check(functions: Sequence[FunctionTool], choice: str) -> None:
    names: dict[str, None] = {}
    for name in (f.name for f in functions):
        if name in names:
            raise invalid_field("tools", f"tools has two functions with the name {name!r}")
        names[name] = None
    if choice == "required" and not names:
        raise invalid_field("tool_choice", "tool_choice is 'required' without tools; add tools")
    if choice.startswith(":") and choice[1:] not in names:
        raise invalid_field(
            "tool_choice",
            f"tool_choice names the unknown function {choice[1:]!r}; tools has: "
            f"{', '.join(names) or 'none'}",
        )


def _object_schema(function: FunctionTool) -> Schema:
    if function.parameters is None:
        return NO_ARGUMENTS
    kind = function.parameters.get("type", "object")
    if kind != "object":
        raise invalid_field(
            "tools",
            f"the parameters of the function {function.name!r} have the type {kind!r}; the type "
            "must be object",
        )
    return {"type": "object", **function.parameters}


def for_template(functions: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """The functions in the form for chat templates."""
    return [
        {
            "type": "function",
            "function": {
                "name": f.name,
                "description": f.description or "",
                "parameters": f.parameters or NO_ARGUMENTS,
            },
        }
        for f in functions
    ]
