"""The functions of a Python module as tools: their names, schemas and time-outs.

from tokenbus.workers.tool import tool

@tool(timeout_s=5)
async def weather(city: str, days: int = 1) -> list[str]:
    \"\"\"The weather of the next days.\"\"\"
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, overload

import msgspec

from ...protocol.decoders import json_decoder
from ...protocol.errors import Code, RequestError
from ...protocol.messages import TOOL_NAME, Tool

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__tokenbus_tool__"
MAX_TIMEOUT_S = 600.0
"""Maximum time-out of a tool, in seconds."""
_PLAIN = (str, int, float, bool, type(None))
"""If a parameter's default has one of these types, the tool's schema shows the default."""

InThread = Callable[[Callable[[], Any]], "typing.Awaitable[Any]"]
"""Runs a function on a thread, and returns its result."""


class _Marked(msgspec.Struct):
    """The arguments of ``tool``."""

    name: str = ""
    timeout_s: float | None = None


class Served(Protocol):
    """A tool that a worker serves."""

    info: Tool

    async def call(self, arguments: bytes, in_thread: InThread) -> Any:
        """Calls the tool and returns its result. ``arguments`` is a JSON object. Raises
        RequestError if the arguments do not match the schema. Exceptions of the tool are not
        caught."""


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str = "", timeout_s: float | None = None) -> Callable[[F], F]: ...
def tool(
    function: F | None = None, /, *, name: str = "", timeout_s: float | None = None
) -> F | Callable[[F], F]:
    """Marks a function as a tool. ``name``: the tool's name on the bus, by default the function's
    name. ``timeout_s``: the tool's time-out, by default the setting ``tool_timeout_s``."""

    def mark(marked: F) -> F:
        setattr(marked, MARK, _Marked(name, timeout_s))
        return marked

    return mark if function is None else mark(function)


class Function:
    """A Python function as a tool. Raises RequestError if the function cannot be a tool."""

    def __init__(self, function: Callable[..., Any], timeout_s: float) -> None:
        """``timeout_s``: the time-out of a function for which ``tool`` has not set a time-out."""
        marked: _Marked = getattr(function, MARK, _Marked())
        name = marked.name or function.__name__
        timeout_s = timeout_s if marked.timeout_s is None else marked.timeout_s
        if re.fullmatch(TOOL_NAME, name) is None:
            raise _wrong(f"{name!r} is not a name of a tool; it must match {TOOL_NAME}")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise _wrong(
                f"the time-out of the tool {name!r} is {timeout_s:g} s; it must be above 0 and at "
                f"most {MAX_TIMEOUT_S:g} s"
            )
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        try:
            arguments = _arguments(name, function)
            self._decode = json_decoder(arguments).decode
            parameters = _object_schema(arguments)
        except (TypeError, ValueError, NameError) as error:
            raise _wrong(
                f"the tool {name!r} has parameters without a schema: {error}; if only "
                "other functions are tools, mark these with @tool"
            ) from None
        self._names = arguments.__struct_fields__
        self.info = Tool(
            name=name,
            description=inspect.getdoc(function) or "",
            parameters=parameters,
            timeout_s=timeout_s,
        )

    async def call(self, arguments: bytes, in_thread: InThread) -> Any:
        """Calls the function, as ``Served.call`` describes."""
        try:
            decoded = self._decode(arguments or b"{}")
        except msgspec.MsgspecError as error:
            text = f"the arguments of the tool {self.info.name!r} are not valid: {error}"
            raise RequestError(Code.INVALID_FIELD, text) from None
        given = {name: getattr(decoded, name) for name in self._names}
        if self._is_async:
            return await self._function(**given)
        return await in_thread(lambda: self._function(**given))


def load_tools(source: str, timeout_s: float) -> dict[str, Served]:
    """The tools of a module, given as its dotted name or as a file that ends with ``.py``.

    The tools are the functions that ``tool`` marks. If no function is marked, all public functions
    that the module defines are tools. Raises RequestError if the module cannot be loaded, or if a
    tool is not valid.
    """
    module = _module(source)
    found = [each for each in vars(module).values() if inspect.isfunction(each)]
    marked = [each for each in found if hasattr(each, MARK)]
    public = [
        each
        for each in found
        if each.__module__ == module.__name__ and not each.__name__.startswith("_")
    ]
    served: dict[str, Served] = {}
    for function in marked or public:
        made = Function(function, timeout_s)
        if made.info.name in served:
            raise _wrong(f"{source} has two tools with the name {made.info.name!r}")
        served[made.info.name] = made
    if not served:
        raise _wrong(f"{source} has no functions; mark one with @tool")
    return served


def _module(source: str) -> ModuleType:
    is_file = source.endswith(".py")
    if not is_file and not all(part.isidentifier() for part in source.split(".")):
        raise _wrong(
            f"{source!r} is neither a file nor a module; expected a file such as mytools.py, or a "
            "module such as my.tools, whose functions with @tool are all served"
        )
    try:
        if not is_file:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            return importlib.import_module(source)
        path = Path(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise _wrong(f"the file {source} does not exist")
        module = importlib.util.module_from_spec(spec)
        # Python looks up the type hints of the module's classes by the module's name.
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except RequestError:
        raise
    except Exception as error:
        raise _wrong(f"cannot load {source}: {type(error).__name__}: {error}") from error


def _arguments(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct type whose fields are the parameters of a function. Raises TypeError if a parameter
    cannot be given by its name."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} cannot be given by its name")
        kind = hints.get(parameter.name, Any)
        default = parameter.default
        if default is parameter.empty:
            fields.append((parameter.name, kind))
        elif isinstance(default, _PLAIN):
            fields.append((parameter.name, kind, default))
        else:
            made = msgspec.field(default_factory=partial(_same, default))
            fields.append((parameter.name, kind, made))
    return msgspec.defstruct(
        re.sub(r"\W", "_", name), fields, kw_only=True, forbid_unknown_fields=True
    )


def _object_schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a struct type, without a reference at its root."""
    (top,), others = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    schema: Mapping[str, Any] = others.pop(top["$ref"].removeprefix("#/$defs/"))
    return {**schema, **({"$defs": others} if others else {})}


def _same(default: Any) -> Any:
    return default


def _wrong(message: str) -> RequestError:
    return RequestError(Code.INVALID_FIELD, message)
