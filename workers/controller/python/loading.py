"""Loads Python controllers by name: ``module:Name``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys

from ....protocol.errors import Code, RequestError
from ..interface import Program
from .classes import Controller, PythonProgram
from .script import ScriptProgram


def load_program(spec: str) -> tuple[str, Program]:
    """Loads the program with the name ``spec``, such as ``module:Name``. Returns the name under
    which the worker registers the program, and the program.

    ``Name`` is a subclass of ``Controller``, a coroutine function, or a ``Program``. The registered
    name is the attribute ``tokenbus_name`` of ``Name`` if it exists, else ``spec``. The module may
    be in the current directory, as with ``python -m``. Raises RequestError if the program cannot be
    loaded.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise _wrong(
            f"{spec!r} does not name a controller; expected module:Name, as in upper:Upper"
        )
    found: object = _import(spec, module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise _wrong(
                f"{spec}: the module {module_name!r} has no attribute {attribute!r}"
            ) from None
    name = getattr(found, "tokenbus_name", spec)
    if not isinstance(name, str) or not name:
        raise _wrong(f"{spec}: its tokenbus_name is {name!r}; expected a string that is not empty")
    return name, _program(spec, name, found)


def _program(spec: str, name: str, found: object) -> Program:
    if isinstance(found, type):
        if issubclass(found, Controller):
            return PythonProgram(found, name)
        raise _wrong(f"{spec} is a class that does not extend tokenbus.workers.controller.python."
                     "Controller")  # fmt: skip
    if inspect.iscoroutinefunction(found):
        return ScriptProgram(found, name)
    if callable(getattr(found, "start", None)):
        return found  # type: ignore[return-value]
    hint = "; a script is an async def" if inspect.isfunction(found) else ""
    raise _wrong(
        f"{spec} is {found!r}, which is not a controller{hint}; expected a subclass of "
        "Controller, a coroutine function, or an object with start(host)"
    )


def _import(spec: str, module_name: str) -> object:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise _wrong(f"{spec}: no module {error.name} found from {here}") from None
        raise _wrong(
            f"{spec}: {module_name} imports {error.name}, which is not installed"
        ) from error
    except Exception as error:
        kind = type(error).__name__
        raise _wrong(f"{spec}: importing {module_name} raised {kind}: {error}") from error


def _wrong(message: str) -> RequestError:
    return RequestError(Code.UNKNOWN_CONTROLLER, message)
