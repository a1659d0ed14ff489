"""The text of an uploaded script.

The first line names the language. So the id of a script, which is the SHA-256 of its bytes, depends
on the language too:

    #!tokenbus javascript
    async function main(ctx) { ... }

Clients add this line. Line numbers in errors do not count this line.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from ....protocol.errors import Code, RequestError
from ....protocol.scripts import LANGUAGES, MAX_SCRIPT_BYTES, SCRIPT_MARK

IN_ARGUMENT = {
    "jsctrl-latest": "javascript",
    "gh:microsoft/aici/jsctrl": "javascript",
    "pyctrl-latest": "python",
    "gh:microsoft/aici/pyctrl": "python",
}
"""Maps a name of a controller in AICI to a language. The controller runs the script in the
request's argument, which is in this language. A tag cannot have such a name."""


class Source(NamedTuple):
    """A script: its language, and its text."""

    language: str
    text: bytes


def is_script(data: bytes) -> bool:
    """Whether an upload is a script and not a Wasm module."""
    return data.startswith(SCRIPT_MARK)


def read_source(data: bytes) -> Source:
    """The script in an upload; raises RequestError if its language is unknown, or if it is too
    large or not UTF-8."""
    head, _, text = data.partition(b"\n")
    language = head.removeprefix(SCRIPT_MARK).strip().decode("utf-8", "replace")
    if language not in LANGUAGES:
        raise _refusal(
            f"the script is in {language[:40]!r}; it must be in one of {', '.join(LANGUAGES)}"
        )
    if len(text) > MAX_SCRIPT_BYTES:
        raise RequestError(
            Code.TOO_LARGE,
            f"the script has {len(text)} bytes; at most {MAX_SCRIPT_BYTES} are allowed",
            path="$.data",
        )
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise _refusal(f"the script is not UTF-8: {error.reason} in line {line}") from None
    return Source(language, text)


_PROGRAM = re.compile(r"\b(main|Main|start|test)\b")
_DEFINED = ("main", "Main")
_CALLED = ("start", "test")
_EXPECTED = {
    "javascript": "async function main(ctx) or class Main extends Controller, or call start(main)",
    "python": "async def main(ctx) or class Main(Controller), or call aici.start(...)",
}
"""For each language: the ways in which a script can define its program, for errors."""


def check_program(source: Source) -> None:
    """Raises RequestError if a script cannot have a program.

    A script in Python must define or import ``main`` or ``Main``, or refer to AICI's ``start`` or
    ``test``. In other languages, the text must contain one of these names.
    """
    if source.language == "python":
        found = _has_program(source.text)
    else:
        found = _PROGRAM.search(source.text.decode("utf-8", "replace")) is not None
    if not found:
        raise _refusal(
            f"the script does not define {_EXPECTED[source.language]}; without one of these, it "
            "has no program"
        )


def _has_program(text: bytes) -> bool:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # The interpreter reports syntax errors.
    return any(map(_names_program, ast.walk(tree)))


def _names_program(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return name in _DEFINED
        case ast.alias(name, asname):
            return (asname or name) in (*_DEFINED, *_CALLED, "*")
        case ast.Name(name, ast.Store()):
            return name in _DEFINED
        case ast.Name(name) | ast.Attribute(attr=name):
            return name in _CALLED
    return False


def _refusal(message: str) -> RequestError:
    return RequestError(Code.INVALID_FIELD, message, path="$.data")
