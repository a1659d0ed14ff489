"""The constraint of an answer, and the receipt that reports how the constraint was enforced."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct, field

from ... import GenerateOptions
from .made_calls import MadeCall

Schema = dict[str, Any]
KeywordState = Literal["enforced", "checked", "failed", "not checked"]
_SCHEMA_FAULT = re.compile(r"structural: tags\[(\d+)\]\.schema: (?:json_schema: )?(.*)", re.DOTALL)
"""Matches an error about the schema of a tag of the constraint ``structural``. The groups are the
tag's number and the reason."""


@dataclass(frozen=True)
class Constraint:
    """A constraint: the name and the argument of the controller that enforces it."""

    label: str
    """The name of the constraint in the receipt."""
    controller: str
    arg: str | dict[str, Any] | list[Any] | None
    field: str
    """The field of the body that requested the constraint, for errors."""
    strict: bool = True
    """Whether the request is refused if the schema has keywords that masks cannot enforce. If this
    is false, the finished answer is checked against these keywords."""

    @property
    def options(self) -> GenerateOptions:
        """The options of ``generate`` for this constraint."""
        options: GenerateOptions = {"controller": self.controller}
        if self.arg is not None:
            options["controller_arg"] = self.arg
        return options

    def in_words(self, message: str) -> str:
        """The message of an error about the argument. If the argument was made from the request's
        tools, the message names the tool."""
        if self.label != "tools" or not isinstance(self.arg, dict):
            return message
        found = _SCHEMA_FAULT.fullmatch(message)
        if found is None:
            return message.removeprefix(f"{self.controller}: ")
        name = self.arg["tags"][int(found[1])].get("name", "")
        return f"tools: the parameters of {name!r}: {found[2]}"


def json_object(name: str) -> Constraint:
    """The constraint that the text is a JSON object. ``name``: the field that requested the
    constraint."""
    return Constraint("json_object", "json_schema", {"type": "object"}, name)


def json_schema(schema: Schema | None, name: str, strict: bool | None) -> Constraint:
    """The constraint that the text is a JSON value that ``schema`` allows, or any JSON object if
    ``schema`` is None. ``name``: the field that requested the constraint."""
    arg = {"type": "object"} if schema is None else schema
    return Constraint("json_schema", "json_schema", arg, name, bool(strict))


class Receipt(Struct, kw_only=True, omit_defaults=True):
    """The field ``tokenbus`` of an answer: the enforced constraint, the report of its controller,
    and whether the answer is exact."""

    constraint: str | None = None
    """``json_schema``, ``json_object``, ``regex``, ``choice``, ``grammar``, ``tools``, or the name
    of the requested controller."""
    ended: Literal["complete", "closed", "cut"] | None = None
    """``complete``: the text is a complete value. ``closed``: the shortest completion was appended
    before the token limit. ``cut``: the text ends inside a value."""
    keywords: dict[str, KeywordState] = field(default_factory=dict)
    """The state of each schema keyword that was rewritten so that masks can enforce it, or that
    masks cannot enforce. ``enforced``: masks enforced the keyword. The other states are outcomes of
    the check of the finished text."""
    logs: str = ""
    """The log of the controller."""
    storage: list[Any] = field(default_factory=list)
    """The variables that the controller wrote, as AICI's storage commands."""
    messages: list[str] = field(default_factory=list)
    """The texts that the program sent to the client. A chunk has only the texts of its entry."""
    waiting: int = 0
    """The number of the input that the program waits for. Only in chunks."""
    tool_calls: list[MadeCall] = field(default_factory=list)
    """The calls of the bus's tools, with their results."""
    tool_messages: list[dict[str, Any]] = field(default_factory=list)
    """``tool_calls`` as messages, if the answer also calls functions of the client. In its next
    request, the client sends these messages before the answer's message."""
    error: str = ""
    """The error of this choice. If all choices fail and the gateway has not called tools, the whole
    request fails instead."""
    code: str = ""
    """The code of ``error``."""
    exact: bool | None = None
    """Whether each step of the answer was exact: the bits of the step's results depend neither on
    the batch nor on the worker. Missing if a worker of an earlier release does not report it."""
    backtrack: int = 0
    """Number of characters that a client must remove from the text before it adds the chunk's
    text. Only in chunks."""
