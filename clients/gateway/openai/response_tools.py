"""The tools of ``/v1/responses``: functions, tools with a text as input, and namespaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from ....protocol.decoders import json_decoder
from ..bodies.field_types import FunctionName
from ..bodies.leniency import Ignored
from ..bodies.reading import Body
from ..conversation.constraints import Schema
from ..conversation.parts import Call
from ..conversation.tools import Tool
from ..errors import invalid_field
from .chat_bodies import BusTool, FunctionTool

TEXT_INPUT: Schema = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The schema of the arguments that the model writes for a tool whose input is a text."""


class ResponseTool(FunctionTool, tag="function", tag_field="type"):
    """A function that the model may call."""


class CustomTool(Body, tag="custom", tag_field="type"):
    """A tool whose input is a text."""

    name: FunctionName
    description: str | None = None
    format: dict[str, Any] | None = None
    """The format of the input: any text, or a grammar, which has no effect."""


class NamespaceTool(Body, tag="namespace", tag_field="type"):
    """Tools of one namespace. The field ``namespace`` of their calls has the value of ``name``."""

    name: FunctionName
    tools: list[ResponseTool | CustomTool]
    description: str | None = None


AnyTool = ResponseTool | CustomTool | NamespaceTool | BusTool


class ToolPlace(NamedTuple):
    """The namespace and the name of a tool in a request."""

    namespace: str | None
    name: str


@dataclass
class OfferedTools:
    """The tools of a request, by the names that the model sees."""

    tools: list[Tool] = field(default_factory=list)
    places: dict[str, ToolPlace] = field(default_factory=dict)
    """The namespace and name of each tool in the request, by the name that the model sees."""
    custom: set[str] = field(default_factory=set)
    """The names, as the model sees them, of the tools whose input is a text."""
    bus: set[str] = field(default_factory=set)
    """The names of the tools of the bus, which the gateway calls."""
    _shown: dict[ToolPlace, str] = field(default_factory=dict)
    """The name that the model sees, by the tool's namespace and name in the request."""

    @classmethod
    def of(
        cls,
        given: Sequence[AnyTool],
        ignored: Ignored,
        served: Mapping[str, Tool] | None = None,
    ) -> OfferedTools:
        """The tools of a request. ``ignored`` records each tool whose ``format`` is a grammar.
        ``served``: the tools of the bus that the request names, by name, as their tool workers
        describe them. A repeated tool is left out. Raises ApiError 400 if a tool has two
        definitions."""
        served = served or {}
        offered = cls(bus=set(served))
        given_tools: dict[ToolPlace, ResponseTool | CustomTool] = {}
        for namespace, tool in _each(given):
            if isinstance(tool, BusTool):
                if tool.name in served:
                    offered.tools.append(served[tool.name])
                continue
            place = ToolPlace(namespace, tool.name)
            if place in given_tools:
                if given_tools[place] == tool:
                    continue
                within = "" if namespace is None else f" of the namespace {namespace!r}"
                raise invalid_field(
                    "tools", f"tools: two tools{within} have the name {tool.name!r}"
                )
            given_tools[place] = tool
            name = tool.name
            if name in offered.places and namespace is not None:
                name = f"{namespace}.{tool.name}"
            offered.places[name] = place
            offered._shown[place] = name
            if isinstance(tool, ResponseTool):
                own = replace(tool.to_tool(), name=name)
            else:
                own = Tool(name, tool.description, TEXT_INPUT)
                offered.custom.add(name)
                if tool.format is not None and tool.format.get("type") != "text":
                    ignored.add(f"format of the tool {tool.name}")
            offered.tools.append(own)
        return offered

    def shown(self, namespace: str | None, name: str) -> str:
        """The name under which the model sees a tool; ``name`` if the request has no such tool."""
        return self._shown.get(ToolPlace(namespace, name), name)


def _each(
    given: Sequence[AnyTool],
) -> Iterator[tuple[str | None, ResponseTool | CustomTool | BusTool]]:
    """The tools with their namespaces."""
    for tool in given:
        if isinstance(tool, NamespaceTool):
            yield from ((tool.name, inner) for inner in tool.tools)
        else:
            yield None, tool


def text_input(call: Call) -> str:
    """The input of a call of a tool whose input is a text; empty if the call was cut off."""
    try:
        found = json_decoder(dict[str, str]).decode(str(call.arguments))
    except msgspec.MsgspecError:
        return ""
    return found.get("input", "")
